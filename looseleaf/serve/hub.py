"""Finds a model by its Hugging Face Hub name. Uses the local cache, or else downloads the model and shows a progress
bar.
"""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import StartupError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WANTED = ("*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model")
_UNWANTED = ("consolidated*", "original/*", "onnx/*", "*/*.safetensors")
"""Files that are not downloaded. Most of them repeat the weights in other formats."""


def is_name(given: str) -> bool:
    """Returns whether `given` has the form ORGANIZATION/NAME and is not an existing path."""
    return _NAME.fullmatch(given) is not None and not Path(given).exists()


def cached(name: str) -> Path | None:
    """Returns the model's directory in the local cache, or None if the cache lacks the configuration or the weights."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = _snapshot(name, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    return found if (found / "config.json").is_file() and any(found.glob("*.safetensors")) else None


def fetch(name: str, *, needs_weights: bool = True) -> Path:
    """Returns the model's directory in the local cache, after a download if necessary. Raises StartupError if the
    download fails or, with `needs_weights`, if the repository has no safetensors files.
    """
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    if (found := cached(name)) is not None:
        return found
    where = f"model {name} is neither a directory nor in the Hugging Face cache ({HF_HUB_CACHE})"
    try:
        found = _snapshot(name)
    except GatedRepoError as error:
        why = f"; its owner grants access on {ENDPOINT}/{name}, then run `hf auth login`"
        raise StartupError(where + why) from error
    except RepositoryNotFoundError as error:
        raise StartupError(f"{where}, and {ENDPOINT} does not show it without `hf auth login`") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise StartupError(
            f"{where}, and {ENDPOINT} cannot be reached; on a machine with access, run `hf download {name} --local-dir "
            f"{name.partition('/')[2]}`, copy that directory here and pass its path"
        ) from error
    if needs_weights and not any(found.glob("*.safetensors")):
        raise StartupError(
            f"{ENDPOINT}/{name} has no *.safetensors files; for a GGUF file, run `hf download {name} FILE.gguf "
            f"--local-dir .` and pass its path; for pickled *.bin files, run `hf download {name} --local-dir "
            f"{name.partition('/')[2]}` and pass that directory, and the command that converts them is shown"
        )
    return found


def _snapshot(name: str, local_files_only: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    wanted, unwanted = list(_WANTED), list(_UNWANTED)
    return Path(
        snapshot_download(name, allow_patterns=wanted, ignore_patterns=unwanted, local_files_only=local_files_only)
    )
