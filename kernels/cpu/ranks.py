"""A process's connections to the ranks of its worker, in the layout of ranks.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence


class Ranks(ctypes.Structure):
    """The C structure of a rank's connections. It contains a stream socket to each rank (the socket at this rank's own
    index is not used), the number of ranks, and the index of this rank. If `rehearses` is set, nothing is exchanged,
    and this rank's sum is used for every peer.
    """

    _fields_ = [("sockets", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("size", "rank", "rehearses")]

    @classmethod
    def of(cls, sockets: Sequence[int], rank: int) -> Ranks:
        """Returns the structure for these sockets, which are file descriptors in the order of the ranks. It rehearses
        until `rehearses` is set to 0.
        """
        numbers = (ctypes.c_int64 * len(sockets))(*sockets)
        found = cls(ctypes.addressof(numbers), len(sockets), rank, 1)
        found._kept = numbers  # type: ignore[attr-defined]  # keeps the memory behind the address alive
        return found
