"""The build of the C++ kernels that the process uses, and counts of calls that took a slower path instead."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

_LOG = logging.getLogger("looseleaf.kernels")


Isa = Literal["avx512", "avx2", "portable", "reference", "triton"]
"""The instruction set of a build. "reference" is plain torch. "triton" is the GPU kernels under triton's interpreter, a
rehearsal that is thousands of times slower and is never chosen automatically.
"""


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """A loaded build. `handle` is None for the torch reference and the rehearsal; `why` gives the reason for using that
    build.
    """

    isa: Isa
    handle: ctypes.CDLL | None
    why: str


@dataclass(slots=True)
class Selection:
    """The process's choice of build, and counts of calls that did not take the fast path."""

    library: CpuLibrary | None = None
    fallbacks: Counter[str] = field(default_factory=Counter)


@functools.cache
def selection() -> Selection:
    """Returns the selection of this process."""
    return Selection()


def count_fallback(what: str, why: str, instead: str = "on the torch reference") -> None:
    """Counts one use of a slower path in place of a fast one, and logs the first use of each kind."""
    counts = selection().fallbacks
    counts[what] += 1
    if counts[what] == 1:
        _LOG.warning("kernels: %s runs %s: %s", what, instead, why)


def fallbacks() -> dict[str, int]:
    """Returns how often each kernel took a slower path that was not requested."""
    return dict(selection().fallbacks)
