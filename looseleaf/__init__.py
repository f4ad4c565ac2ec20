"""Exports the library's public names, such as `Client`, `AsyncClient` and `LLM`. The module that defines a name is
imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from common.version import VERSION

if TYPE_CHECKING:
    from common.errors import LooseleafError, StartupError
    from common.types import StructuredOutput
    from looseleaf.client import AsyncClient, Client
    from looseleaf.llm import LLM
    from looseleaf.results import Completion, Delta, Embedding, ModelInfo, Sample, Usage

__version__ = VERSION
__all__ = [
    "LLM",
    "AsyncClient",
    "Client",
    "Completion",
    "Delta",
    "Embedding",
    "LooseleafError",
    "ModelInfo",
    "Sample",
    "StartupError",
    "StructuredOutput",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'looseleaf' has no attribute {name!r}")
    return getattr(importlib.import_module(_home(name)), name)


def _home(name: str) -> str:
    if name in ("LooseleafError", "StartupError"):
        return "common.errors"
    if name == "StructuredOutput":
        return "common.types"
    if name in ("Client", "AsyncClient"):
        return "looseleaf.client"
    return "looseleaf.llm" if name == "LLM" else "looseleaf.results"
