"""Makes a model directory from a GGUF file, and reads the file's tensors under their Hugging Face names.

`python -m engine.gguf_file FILE DIRECTORY` writes config.json, the tokenizer and a link to the file. The command does
not copy the weights. It needs the packages gguf and transformers; reading tensors needs only gguf.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.checkpoint import GGUF_NAME, WeightFile
from engine.config import ARCHITECTURES, ModelConfig, read_json
from engine.errors import ModelError, UnsupportedModel

INSTALL = "pip install 'looseleaf[gguf]'"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The families whose tensors are read from GGUF files."""
ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor that contains RoPE scaling factors. In config.json, Llama 3.1 and later describe these factors
with `rope_scaling`.
"""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def make_directory(file: Path, directory: Path) -> None:
    """Writes a model directory for a GGUF file. Raises ModelError if a package is missing or the file cannot be read,
    and UnsupportedModel if the model is not supported.
    """
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"GGUF files need the packages gguf and transformers: {INSTALL}") from error
    reader = _open(file)
    architecture = _field(reader, "general.architecture")
    try:
        found = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # transformers may raise any error for a malformed file
        raise UnsupportedModel(f"transformers cannot read {file}: {error!r}"[:300]) from error
    families = {family: name for name, family in ARCHITECTURES.items() if family in FAMILIES}
    if found.get("model_type") not in families:
        supported = ", ".join(families)
        raise UnsupportedModel(f"GGUF files of {architecture} are not supported; only those of {supported} are")
    if (key_length := reader.get_field(f"{architecture}.attention.key_length")) is not None:
        found["head_dim"] = int(key_length.contents())  # transformers does not read it for every family
    if (factors := _tensor(reader, ROPE_FACTORS)) is not None:
        found["rope_scaling"] = _rope_scaling(factors, found)
        found["rope_parameters"] = found["rope_scaling"] | {"rope_theta": _theta(found)}
    quantized = {"quantization_config": {"quant_method": "gguf", "permuted": architecture == "llama"}}
    config = found | quantized | {"architectures": [families[found["model_type"]]]}
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    ends = [found[name] for name in ("eos_token_id",) if found.get(name) is not None]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[0]} if ends else {}))
    (directory / "config.json").write_text(json.dumps(config, default=str))
    (directory / GGUF_NAME).unlink(missing_ok=True)
    (directory / GGUF_NAME).symlink_to(file.resolve())
    ModelConfig.from_directory(directory, "native")  # raises if the model is not supported


def _theta(config: dict[str, Any]) -> float:
    return float(config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta") or 10_000.0)


def _rope_scaling(factors: np.ndarray[Any, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns the Llama 3 RoPE scaling that has these factors. Raises UnsupportedModel if there is no such scaling."""
    dim = 2 * len(factors)
    wavelengths = 2 * math.pi * _theta(config) ** (np.arange(0, dim, 2) / dim)
    low, high, original = LLAMA3.values()
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    factor = float(factors.max())
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
        raise UnsupportedModel(f"{ROPE_FACTORS} is not Llama 3's rope scaling, the only one that is supported")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _open(file: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ModelError(f"GGUF files need the package gguf: {INSTALL}") from error
    try:
        return gguf.GGUFReader(file)
    except Exception as error:  # the reader may raise any error for a malformed file
        raise ModelError(f"{file} cannot be read as a GGUF file ({error!r})"[:300]) from error


def _field(reader: Any, name: str) -> Any:
    if (field := reader.get_field(name)) is None:
        raise ModelError(f"the GGUF file has no {name}")
    return field.contents()


def _tensor(reader: Any, name: str) -> np.ndarray[Any, Any] | None:
    return next((tensor.data for tensor in reader.tensors if tensor.name == name), None)


def _names(reader: Any) -> dict[str, Any]:
    """Returns the file's tensors, except the RoPE factors, by their Hugging Face names."""
    import gguf

    architecture = _field(reader, "general.architecture")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = int(_field(reader, f"{architecture}.block_count"))
    table = gguf.get_tensor_name_map(kinds[architecture], layers)
    parts = {f"self_attn.{name}": None for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    parts |= dict.fromkeys(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm"])
    prefixes = [f"model.layers.{i}.{part}" for i in range(layers) for part in (*parts, "post_attention_layernorm")]
    wanted = {}
    for prefix in ("model.embed_tokens", "model.norm", "lm_head", *prefixes):
        if (name := table.get_name(prefix)) is not None:
            wanted |= {f"{name}{suffix}": f"{prefix}{suffix}" for suffix in (".weight", ".bias")}
    return {wanted.get(tensor.name, tensor.name): tensor for tensor in reader.tensors if tensor.name != ROPE_FACTORS}


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))  # a GGUF file lists the fastest-varying dimension first


def weight_file(directory: Path) -> WeightFile:
    """Returns a directory's GGUF file, with the types, shapes and offsets of its tensors. Raises ModelError if it
    cannot be read.
    """
    path = directory / GGUF_NAME
    reader = _open(path)
    begin = {name: int(tensor.data_offset) for name, tensor in _names(reader).items()}
    start = min(begin.values(), default=0)
    tensors = {
        name: (tensor.tensor_type.name, _shape(tensor), begin[name] - start, begin[name] - start + int(tensor.n_bytes))
        for name, tensor in _names(reader).items()
    }
    with path.open("rb") as stream:
        header = stream.read(start)
    return WeightFile(path, header, start, tensors)


class GgufSource:
    """A source of the tensors of a memory-mapped GGUF file (see `engine.loader.TensorSource`).

    `raw` accepts NAME.type for the number of the tensor's type, and NAME.blocks for the tensor's bytes [rows, bytes].
    """

    def __init__(self, file: WeightFile, device: torch.device) -> None:
        self._tensors = _names(_open(file.path))
        self._device = device
        self._unused = set(self._tensors)
        config = read_json(file.path.parent / "config.json")
        permuted = bool(config["quantization_config"].get("permuted"))
        self._heads = {
            "q_proj": int(config["num_attention_heads"]),
            "k_proj": int(config.get("num_key_value_heads") or config["num_attention_heads"]),
        } if permuted else {}  # fmt: skip

    def has(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import gguf

        if name not in self._tensors:
            raise ModelError(f"the checkpoint lacks tensor {name}, shape {list(shape)}")
        tensor = self._tensors[name]
        if _shape(tensor) != shape:
            found = list(_shape(tensor))
            raise ModelError(f"tensor {name} of the GGUF file has shape {found}, but the config requires {list(shape)}")
        floats = gguf.dequantize(tensor.data, tensor.tensor_type)
        self._unused.discard(name)
        rows = torch.from_numpy(np.array(floats, dtype=np.float32)).view(shape)
        return self._in_order(name, rows).to(dtype).to(self._device)

    def raw(self, name: str) -> torch.Tensor:
        whole, _, what = name.rpartition(".")
        tensor = self._tensors[whole]
        if what == "type":
            return torch.tensor(int(tensor.tensor_type))
        self._unused.discard(whole)
        bytes_ = torch.from_numpy(np.array(tensor.data).view(np.uint8).reshape(_shape(tensor)[0], -1))
        return self._in_order(whole, bytes_)

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Restores the order of the rows of queries and keys, which llama.cpp changes because its RoPE rotates
        neighboring pairs instead of halves.
        """
        heads = next((n for part, n in self._heads.items() if f".{part}." in name), None)
        if heads is None:
            return rows
        return rows.view(heads, rows.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(rows.shape)

    def unused(self) -> list[str]:
        return sorted(self._unused)


def main() -> None:
    file, directory = map(Path, sys.argv[1:])
    try:
        make_directory(file, directory)
    except ModelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
