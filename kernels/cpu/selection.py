"""Which build of the C++ kernels the process runs on, and the counts of what ran on the torch reference instead."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

_LOG = logging.getLogger("looseleaf.kernels")


Isa = Literal["avx512", "avx2", "portable", "reference", "triton"]
"""An instruction set that a build is for. "reference" is plain torch; "triton" is the GPU's kernels under triton's
interpreter: a rehearsal, some thousand times slower, never chosen.
"""


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """One loaded build. `handle` is None when the torch reference (or the rehearsal) stands in; `why` says why."""

    isa: Isa
    handle: ctypes.CDLL | None
    why: str


@dataclass(slots=True)
class Selection:
    """The process's choice and the counts of what did not take the fast path."""

    library: CpuLibrary | None = None
    fallbacks: Counter[str] = field(default_factory=Counter)


@functools.cache
def selection() -> Selection:
    """The one of this process."""
    return Selection()


def count_fallback(what: str, why: str, instead: str = "on the torch reference") -> None:
    """Counts one use of something slower in place of a fast path and logs the first one of each kind."""
    counts = selection().fallbacks
    counts[what] += 1
    if counts[what] == 1:
        _LOG.warning("kernels: %s runs %s: %s", what, instead, why)


def fallbacks() -> dict[str, int]:
    """How often each kernel took a slower path though nobody asked for it."""
    return dict(selection().fallbacks)
