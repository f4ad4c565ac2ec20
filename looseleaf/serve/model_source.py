"""Finds the model directory that a launch serves, or creates a small random model if no model is given and none is
built in. Loads no weights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartupError
from looseleaf.serve import hub

REPOSITORY = Path(__file__).resolve().parents[2]
_IN_WHEEL = REPOSITORY / "looseleaf" / "storyteller"
BUILT_IN = _IN_WHEEL if _IN_WHEEL.is_dir() else REPOSITORY / "models" / "storyteller"
_MAKE = "import sys; from engine.tiny import make_checkpoint; make_checkpoint(sys.argv[1], 'llama', seed=0)"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_VERSION = 1
"""The version of the random model. It must be incremented when the model changes, so that no old model in the cache is
used.
"""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model directory that exists."""

    directory: Path
    notice: str | None = None
    """A note about the model for the user, or None."""
    is_tiny: bool = False


def resolve(given: str | None, *, dummy: bool = False) -> ModelSource:
    """Returns the directory of the model `given` (a directory, a GGUF file or a name on the Hugging Face Hub). If
    `given` is None, returns the directory of the built-in model or, if there is none, of a small random model. Raises
    StartupError if the model cannot be found, downloaded or created.

    With `dummy` weights, the directory needs only a config.json. The small random model's tokenizer replaces a missing
    tokenizer.
    """
    if given is not None:
        directory = hub.fetch(given, needs_weights=not dummy) if hub.is_name(given) else _checked(Path(given))
        if dummy and not (directory / "tokenizer.json").exists():
            return ModelSource(
                with_tokenizer(directory, cache_directory()), f"{directory} has no tokenizer: using another one"
            )
        return ModelSource(directory)
    if BUILT_IN.is_dir():
        return ModelSource(BUILT_IN)
    return ModelSource(
        tiny_checkpoint(cache_directory()),
        notice="no model given: serving a small one with random weights, so its text will be gibberish",
        is_tiny=True,
    )


def _checked(directory: Path) -> Path:
    if directory.suffix == ".gguf" and directory.is_file():
        return gguf_directory(directory, cache_directory())
    if not directory.is_dir():
        raise StartupError(f"model directory {directory} does not exist")
    if not (directory / "config.json").is_file():
        raise StartupError(f"model directory {directory} has no config.json; a Hugging Face model directory is needed")
    return directory


def cache_directory() -> Path:
    """Returns $XDG_CACHE_HOME/looseleaf, or else ~/.cache/looseleaf."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "looseleaf"


def tiny_checkpoint(cache: Path) -> Path:
    """Returns the directory of a small random Llama below `cache`. On first use, a separate process creates the model,
    because this needs torch. Raises StartupError if the model cannot be created.
    """
    target = cache / f"tiny-llama-{_VERSION}"
    if (target / "config.json").is_file():
        return target
    partial = cache / f"{target.name}.{os.getpid()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(
            [sys.executable, "-c", _MAKE, str(partial)], capture_output=True, text=True, cwd=REPOSITORY, check=False
        )
        if made.returncode != 0:
            raise StartupError(f"the small random model could not be created: {_last_line(made.stderr)}")
        partial.rename(target)
    except OSError as error:
        if not (target / "config.json").is_file():  # another launch may have created it
            raise StartupError(f"cannot write the small random model to {target}: {error.strerror}") from error
    return target


def gguf_directory(file: Path, cache: Path) -> Path:
    """Returns a model directory below `cache` for a GGUF file. On first use, a separate process creates the directory,
    because this needs transformers.

    The weights stay in the file. A different file with the same name gets a different directory. Raises StartupError
    if the directory cannot be created.
    """
    state = file.resolve().stat()
    identity = f"{file.resolve()} {state.st_size} {state.st_mtime_ns}"
    target = cache / f"gguf-{hashlib.sha256(identity.encode()).hexdigest()[:16]}" / file.stem
    if (target / "config.json").is_file():
        return target
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    command = [sys.executable, "-m", "engine.gguf_file", str(file.resolve()), str(partial)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
        if made.returncode != 0:
            raise StartupError(_last_line(made.stderr))
        partial.rename(target)
    except OSError as error:
        if not (target / "config.json").is_file():  # another launch may have created it
            raise StartupError(f"cannot write to {target}: {error.strerror}") from error
    return target


def with_tokenizer(directory: Path, cache: Path) -> Path:
    """Returns a directory of the same name below `cache`, with `directory`'s config.json and the small random model's
    tokenizer. Raises StartupError if the directory cannot be created.
    """
    tiny = tiny_checkpoint(cache)
    config = (directory / "config.json").read_bytes()
    target = cache / f"dummy-{hashlib.sha256(config).hexdigest()[:16]}" / directory.resolve().name
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in _TOKENIZER_FILES:
            shutil.copyfile(tiny / name, target / name)
        (target / "config.json").write_bytes(config)
    except OSError as error:
        raise StartupError(f"cannot write to {target}: {error.strerror}") from error
    return target


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
