"""Joins a holder to a rebuilt ledger: registers the holder, and asserts its blocks in parts, so that no call takes long
even if the holder has many blocks. An interrupted attempt can be continued.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from block_store.ledger.replies import Standing
from block_store.ledger.scripts import CallId, LedgerScripts, chunks
from common.types import BlockRef, Epoch


@dataclass(slots=True)
class Joining:
    """The progress of a holder that joins a rebuilt ledger. The methods can raise LedgerUnavailable (call again),
    StaleDataset and LedgerDamaged. `assert_all` raises Fenced if the holder's lease has ended.
    """

    ledger: LedgerScripts
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Token of the registration, so that a repeated registration does not create a second holder."""
    epoch: Epoch | None = None
    number: int = 0
    """Number of the last answered call."""
    standings: dict[BlockRef, Standing] = field(default_factory=dict)
    _unanswered: Sequence[BlockRef] = ()
    _beaten_at: float = 0.0

    def register(self, name: str, writer_slot: int, floor: int, lease_s: float) -> None:
        """Registers the holder unless it is registered already. Raises FloorsExceedArena if the floors do not fit into
        the arena.
        """
        if self.epoch is None:
            self.epoch = self.ledger.register(
                name, writer_slot=writer_slot, floor=floor, lease_s=lease_s, token=self.token
            )
            self._beaten_at = time.monotonic()

    def assert_all(self, refs: Sequence[BlockRef], lease_s: float) -> dict[BlockRef, Standing]:
        """Asserts `refs`. Returns their standings, and the standings of the blocks that earlier attempts asserted.
        After the call, no block waits for the holder's writer slot.
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
        """Asserts one part. An unanswered call is repeated with the same number and references."""
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
        """Frees blocks that still wait for the holder's writer slot because the holder has not asserted them. One call
        frees a limited number of blocks. Returns whether another call is needed.
        """
        assert self.epoch is not None
        more = self.ledger.assert_all(CallId(self.epoch, self.number + 1))
        self.number += 1
        return more
