"""Remembers which blocks the ledger has found in a ticket, so that a pull, which asks for hashes first and for bytes
later, has each of its blocks looked up once.

A ticket has the same blocks until it is claimed or ends, and the ledger is still asked each time whether it has ended.
What is remembered names a block with its generation, so it does not apply to a block that was reallocated.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from common.ticket import TicketId
from common.types import BlockRef

MAX_BLOCKS = 1 << 16
"""Number of blocks that are remembered. If there are more, the tickets that were asked about first are forgotten."""


class KnownTickets:
    """The blocks of recent tickets. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[TicketId, set[BlockRef]] = {}
        self._num_blocks = 0

    def add(self, ticket: TicketId, refs: Sequence[BlockRef]) -> None:
        """Remembers that the ledger has found `refs` in a ticket."""
        with self._lock:
            known = self._blocks.setdefault(ticket, set())
            self._num_blocks -= len(known)
            known.update(refs)
            self._num_blocks += len(known)
            while self._num_blocks > MAX_BLOCKS:
                self._num_blocks -= len(self._blocks.pop(next(iter(self._blocks))))

    def forget(self, ticket: TicketId) -> None:
        """Forgets a ticket that has ended."""
        with self._lock:
            self._num_blocks -= len(self._blocks.pop(ticket, ()))

    def has(self, ticket: TicketId, refs: Sequence[BlockRef]) -> bool:
        """Returns whether the ledger has found all of `refs` in the ticket."""
        with self._lock:
            known = self._blocks.get(ticket)
            return known is not None and known.issuperset(refs)
