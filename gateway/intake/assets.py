"""Reads the data that the gateway needs from a model's directory: the tokenizer, sizes, generation defaults and chat
templates. The gateway does not read the model's weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.digests import check_digests
from common.errors import StartupError

UNLIMITED = 32_768
"""The longest sequence, in tokens, of a model whose config states no limit."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The sampling defaults from generation_config.json, used as in vLLM (do_sample is ignored)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


READ = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja")  # fmt: skip
"""The files that `load_assets` reads from a model's directory, if they exist."""


@dataclass(frozen=True, slots=True)
class ModelAssets:
    """The gateway's record of a model: names, tokenizer, sizes, defaults and templates."""

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    """The size of the model's vocabulary. Token ids must be below it. The tokenizer's vocabulary may be smaller."""
    max_position: int
    """The longest sequence in tokens, unless a worker states a different length. It is `max_position_embeddings`, or
    `UNLIMITED` if the config has none, as for a model without attention.
    """
    eos_token_ids: tuple[int, ...]
    hidden_size: int | None = None
    """Number of dimensions of an embedding, or None if the config does not state it."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    chat_template: str | None = None
    tool_template: str | None = None
    """A separate template for requests with tools, if the model has one."""
    longest_token: int = 64
    """An upper bound on the size of a token in bytes. A text of more bytes than max_model_len times this number does
    not fit, unless the tokenizer's normalization shortens the text.
    """
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """The texts of the special tokens by name (bos_token, eos_token, ...), for the chat template."""


def load_assets(directory: str, served_name: str | None = None) -> ModelAssets:
    """Returns the data of a model in a Hugging Face directory, under `served_name` or, if it is not given, under the
    directory's name. Raises StartupError if a required file is missing, or if a file is invalid.
    """
    path = Path(directory)
    if not path.is_dir():
        raise StartupError(f"--model: {directory} is not a directory")
    check_digests(path, READ)
    config = read_json(path / "config.json", required=True)
    generation = read_json(path / "generation_config.json")
    tokenizer_config = read_json(path / "tokenizer_config.json")
    tokenizer = _read_tokenizer(path / "tokenizer.json")
    return ModelAssets(
        name=served_name or path.resolve().name,
        tokenizer=tokenizer,
        vocab_size=_positive(config, "vocab_size", path),
        max_position=_positive({"max_position_embeddings": UNLIMITED} | config, "max_position_embeddings", path),
        eos_token_ids=_eos_ids(generation, config),
        hidden_size=_positive(config, "hidden_size", path) if "hidden_size" in config else None,
        defaults=_defaults(generation, path),
        chat_template=_chat_template(path, tokenizer_config, "default"),
        tool_template=_chat_template(path, tokenizer_config, "tool_use"),
        longest_token=max((len(token.encode()) for token in tokenizer.get_vocab()), default=64),
        special_tokens=_special_tokens(tokenizer_config),
    )


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} if the file is missing and not `required`. Raises StartupError if the
    file is required and missing, or does not contain a JSON object.
    """
    if not path.exists():
        if required:
            raise StartupError(f"{path} is missing")
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError):
        raise StartupError(f"{path} cannot be read as JSON") from None
    if not isinstance(content, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return content


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        raise StartupError(f"{path} is missing; the gateway needs a fast tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise StartupError(f"{path} is not a tokenizer: {str(error)[:200]}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _positive(config: Mapping[str, Any], name: str, path: Path) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise StartupError(f"{path / 'config.json'}: {name} must be a positive integer, got {value!r}")
    return value


def _eos_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of the first config that contains any ids. A config contains one id or a list."""
    for config in configs:
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(item) for item in value)
    return ()


def _defaults(generation: Mapping[str, Any], path: Path) -> GenerationDefaults:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise StartupError(f"{path / 'generation_config.json'}: {name} must be a number, got {value!r}")
    return GenerationDefaults(**given)


def _chat_template(path: Path, tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    """Returns the template with this name, or None if there is none. "default" is chat_template.jinja; others are in
    additional_chat_templates. If there is no such file, returns the entry in tokenizer_config.json, which is a string
    (the default template) or a list of named templates.
    """
    file = path / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
    if file.exists():
        return file.read_text(encoding="utf-8")
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        return {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}.get(name)
    return entry if isinstance(entry, str) and name == "default" else None


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
