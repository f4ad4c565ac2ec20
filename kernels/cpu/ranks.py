"""The place of a process among the ranks of a worker, as the C++ kernels read it (ranks.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence


class Ranks(ctypes.Structure):
    """One stream socket to each rank (the own entry is not used), the number of ranks, and the own rank. While it
    `rehearses`, nothing is exchanged, and every peer's sum is taken to be the own one.
    """

    _fields_ = [("sockets", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("size", "rank", "rehearses")]

    @classmethod
    def of(cls, sockets: Sequence[int], rank: int) -> Ranks:
        """`sockets` are file descriptors, in the order of the ranks."""
        numbers = (ctypes.c_int64 * len(sockets))(*sockets)
        found = cls(ctypes.addressof(numbers), len(sockets), rank, 1)
        found._kept = numbers  # type: ignore[attr-defined]  # keeps the memory behind the address alive
        return found
