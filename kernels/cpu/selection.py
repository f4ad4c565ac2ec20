"""The build of the C++ kernels that the process uses, and the counts of fallbacks to slower paths."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

_LOG = logging.getLogger("looseleaf.kernels")


Isa = Literal["avx512", "avx2", "portable", "reference", "triton"]
"""The instruction set of a build. "reference" means plain torch. "triton" means the GPU kernels under triton's
interpreter, a slow rehearsal that must be requested.
"""


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """A loaded build. `handle` is None for "reference" and "triton"; `why` is the reason for the choice. `tiles` is
    whether attention of bf16 uses AMX tiles.
    """

    isa: Isa
    handle: ctypes.CDLL | None
    why: str
    tiles: bool = False


@dataclass(slots=True)
class Selection:
    """The process's build, and the number of fallbacks of each kind."""

    library: CpuLibrary | None = None
    fallbacks: Counter[str] = field(default_factory=Counter)


@functools.cache
def selection() -> Selection:
    """Returns the selection of this process."""
    return Selection()


def count_fallback(what: str, why: str, instead: str = "on the torch reference") -> None:
    """Counts a fallback to a slower path, and logs the first fallback of each kind."""
    counts = selection().fallbacks
    counts[what] += 1
    if counts[what] == 1:
        _LOG.warning("kernels: %s runs %s: %s", what, instead, why)


def fallbacks() -> dict[str, int]:
    """Returns the number of fallbacks of each kind, by name."""
    return dict(selection().fallbacks)
