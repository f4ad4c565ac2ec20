"""Finds the weight files of a model directory and the positions of their tensors, and computes their fingerprint.

A safetensors file begins with a header: 8 bytes with the length of the JSON that follows. This module reads the header
and small samples of the tensors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import read_json
from engine.errors import ModelError

MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors format sets for the size of a header, in bytes."""
GGUF_NAME = "model.gguf"
"""Name of the link to a GGUF file in a model directory that `engine.gguf_file` has made."""
SAMPLE_BYTES = 512
"""Maximum number of bytes that a fingerprint reads at the start and in the middle of each tensor."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors or GGUF file. `tensors` maps a name to (dtype, shape, begin, end), with offsets in bytes from
    `data_start`.
    """

    path: Path
    header: bytes
    data_start: int
    tensors: dict[str, tuple[str, tuple[int, ...], int, int]]


def weight_files(directory: Path) -> list[WeightFile]:
    """Returns the checkpoint's files in name order. Headers of safetensors files are checked against the sizes of the
    files. Raises ModelError, which names the file, if a file is missing or corrupt.
    """
    if (directory / GGUF_NAME).exists():
        from engine.gguf_file import weight_file  # needs the gguf package

        return [weight_file(directory)]
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = ["model.safetensors"]
        if not (directory / names[0]).exists():
            hint = f"; pickled *.bin files are not read: {convert(directory)}" if any(directory.glob("*.bin")) else ""
            raise ModelError(f"{directory} has neither model.safetensors nor model.safetensors.index.json{hint}")
    return [_read_header(directory / name) for name in names]


def convert(directory: Path) -> str:
    """Returns the part of an error message that gives the command to convert a directory's pickled weights to
    safetensors.
    """
    load = f"AutoModelForCausalLM.from_pretrained('{directory}', dtype='auto')"
    code = f"from transformers import *; {load}.save_pretrained('{directory}')"
    return f'convert them with python -c "{code}"'


def fingerprint(directory: str | Path, dtype: str, load_format: str, seed: int = 0) -> str:
    """Returns a hex SHA-256 by which different weights can be told apart without reading all of them. It covers
    config.json (without two fields that vary between copies), the dtype, and the name, header and sampled content of
    every weight file, or the seed of dummy weights. Copies of a model in different directories have equal fingerprints.
    """
    path = Path(directory)
    config = read_json(path / "config.json")
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps([config, dtype], sort_keys=True).encode())
    if load_format == "dummy":
        digest.update(f"dummy {seed}".encode())
        return digest.hexdigest()
    for file in weight_files(path):
        digest.update(file.path.name.encode() + b"\0" + file.header)
        with file.path.open("rb") as stream:
            for _, _, begin, end in sorted(file.tensors.values(), key=lambda entry: entry[2]):
                for offset in (begin, (begin + end) // 2):
                    stream.seek(file.data_start + offset)
                    digest.update(stream.read(min(SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()


def _read_header(path: Path) -> WeightFile:
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{path} is corrupt: its header length is {length} in a file of {size} bytes")
            header = stream.read(length)
        tensors = _entries(json.loads(header))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is corrupt: its header is not valid ({error})") from error
    end = max((entry[3] for entry in tensors.values()), default=0)
    if size != 8 + length + end:
        raise ModelError(f"{path} is corrupt: it has {size} bytes, but its header requires {8 + length + end}")
    return WeightFile(path, header, 8 + length, tensors)


def _entries(header: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    entries = {}
    for name, value in header.items():
        if name != "__metadata__":
            begin, end = value["data_offsets"]
            entries[name] = (str(value["dtype"]), tuple(int(n) for n in value["shape"]), int(begin), int(end))
    return entries
