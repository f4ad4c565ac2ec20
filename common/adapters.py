"""Checks the names of LoRA adapters in PEFT's format, computes their digests, and reads their configurations.

All services identify an adapter by its *digest*, the SHA-256 of its configuration and weights. Clients choose an
adapter by its name. This module does not use torch, because the gateway also reads configurations.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_REFUSED = {
    "use_dora": "DoRA changes the norms of the weights",
    "modules_to_save": "whole layers of an adapter are not served",
    "trainable_token_indices": "changed embeddings are not served",
    "layer_replication": "the model's layers cannot be repeated",
    "target_parameters": "parameters outside of linear layers cannot be adapted",
    "alora_invocation_tokens": "an adapter applies to all tokens",
    "fan_in_fan_out": "weights of Conv1D layers are not supported",
    "lora_bias": "only the weights of linear layers can be adapted",
    "use_qalora": "QALoRA pools the inputs",
}
"""Settings that must be absent, false or empty, with the reasons."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of the values of init_lora_weights with which PEFT also changes the base weights."""


class AdapterError(ValueError):
    """The error for an adapter that cannot be read or served, or whose name is invalid. Its message is one sentence."""


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A reference to an adapter that an operator has named."""

    name: str
    """The name that clients give as their model."""
    path: str
    """The adapter's directory, on the gateway and on every worker."""
    digest: str
    """The SHA-256 of the adapter's content, in hex."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The fields of PEFT's LoraConfig that determine the ranks and scales of an adapter's matrices."""

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Returns alpha / r or, with rsLoRA (Kalajdzievski 2023), alpha / sqrt(r)."""
        rank, alpha = self.rank_of(module), _matching(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matching(pattern: Mapping[str, float] | None, module: str, default: float) -> float:
    """Returns the value of the first key that matches the module's name or the name's last parts, or `default` if no
    key matches. As in PEFT, keys are regular expressions.
    """
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def read_config(directory: str | Path) -> LoraConfig:
    """Reads adapter_config.json. Raises AdapterError if the file cannot be read or is invalid, or if it describes an
    adapter that cannot be served.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterError(f"{path} has more than {MAX_CONFIG_BYTES} bytes")
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise AdapterError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{path} must hold an object")
    _refuse(path, raw)
    try:
        config = LoraConfig(
            int(raw["r"]), float(raw["lora_alpha"]), bool(raw.get("use_rslora")),
            _numbers(raw.get("rank_pattern")), _numbers(raw.get("alpha_pattern")),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise AdapterError(f"{path}: r, lora_alpha, rank_pattern or alpha_pattern is missing or invalid") from error
    if config.rank < 1 or not math.isfinite(config.alpha):
        raise AdapterError(f"{path}: r must be at least 1 and lora_alpha finite, got {config.rank}, {config.alpha}")
    return config


def _numbers(pattern: Any) -> dict[str, Any]:
    found = {str(key): value for key, value in (pattern or {}).items()}
    for key, value in found.items():
        re.compile(key)
        if not value > 0:
            raise ValueError(f"{key} must be positive")
    return found


def _refuse(path: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {raw.get('peft_type')!r}; only LORA is supported")
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias is {raw['bias']!r}; only none is supported")
    for name, why in _REFUSED.items():
        if raw.get(name):
            raise AdapterError(f"{path}: {name} is not supported: {why}")
    init = raw.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{path}: init_lora_weights {init!r} also changes the base weights; convert the adapter with PEFT first"
        )


def digest_of(directory: str | Path) -> str:
    """Returns the hex SHA-256 of an adapter's configuration and weights. Raises AdapterError if one of the two files
    cannot be read.
    """
    digest = hashlib.sha256(b"looseleaf/adapter\0")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        path = Path(directory) / name
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            hint = "; pickled *.bin files are not read" if (path.parent / "adapter_model.bin").exists() else ""
            raise AdapterError(f"{path} cannot be read: {error.strerror}{hint}") from None
    return digest.hexdigest()


def read_adapter(name: str, directory: str) -> AdapterRef:
    """Reads both files of an adapter. Returns a reference to the adapter. Raises AdapterError if the name is invalid,
    or if the adapter cannot be read or served.
    """
    if not _NAME.fullmatch(name):
        raise AdapterError(
            "an adapter's name has up to 128 letters, digits and . _ : / -, and starts with a letter or digit"
        )
    path = Path(directory).expanduser().resolve()
    read_config(path)
    return AdapterRef(name, str(path), digest_of(path))


def parse_module(text: str) -> tuple[str, str]:
    """Splits "name=path" into the name and the path. Raises AdapterError if one of them is missing."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise AdapterError("must be name=path")
    return name, path
