"""A holder's way into a ledger that was built anew: registered once, everything asserted in pieces, each once.

However much is held, no call is long, and a try that ended half-way is gone on with. Independent of what the
references are for.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from block_store.ledger.scripts import CallId, LedgerScripts, Standing, chunks
from common.types import BlockRef, Epoch


@dataclass(slots=True)
class Joining:
    """Where a holder is on its way. Errors of all methods: LedgerUnavailable (call again), StaleDataset, Fenced."""

    ledger: LedgerScripts
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """By which a repeated registration is known: another holder of the same floor would be left behind."""
    epoch: Epoch | None = None
    number: int = 0
    """Of the last call that was answered."""
    standings: dict[BlockRef, Standing] = field(default_factory=dict)
    _unanswered: Sequence[BlockRef] = ()
    _beaten_at: float = 0.0

    def register(self, name: str, writer_slot: int, floor: int, lease_s: float) -> None:
        """FloorsExceedArena too."""
        if self.epoch is None:
            self.epoch = self.ledger.register(
                name, writer_slot=writer_slot, floor=floor, lease_s=lease_s, token=self.token
            )
            self._beaten_at = time.monotonic()

    def assert_all(self, refs: Sequence[BlockRef], lease_s: float) -> dict[BlockRef, Standing]:
        """What became of each of `refs`, and of what earlier tries have asserted. From then on nothing waits for the
        holder's writer slot.
        """
        if self._unanswered:
            self._assert(self._unanswered, lease_s)
        left = [ref for ref in refs if ref not in self.standings]
        for part in chunks(left):
            self._assert(part, lease_s)
        while self._end():
            continue
        return self.standings

    def _assert(self, part: Sequence[BlockRef], lease_s: float) -> None:
        """A repeated call carries the same number and the same references, and is answered as the first."""
        assert self.epoch is not None
        self._unanswered = part
        found = self.ledger.assert_held(CallId(self.epoch, self.number + 1), part)
        self.number += 1
        self._unanswered = ()
        self.standings.update(zip(part, found, strict=True))
        if time.monotonic() - self._beaten_at > lease_s / 5:
            self.ledger.beat(self.epoch, lease_s, self.number)
            self._beaten_at = time.monotonic()

    def _end(self) -> bool:
        """Whether some is left to be freed. Done twice it is as done once."""
        assert self.epoch is not None
        more = self.ledger.assert_all(CallId(self.epoch, self.number + 1))
        self.number += 1
        return more
