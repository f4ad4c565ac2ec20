"""The ledger as one holder uses it: an epoch, a lease (`lease`), and calls that happen once each (`lane`).

What is over more blocks than one call takes is made in several. Independent of sequences; `HeldBlocks` counts those.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from block_store.errors import Exhausted, Fenced, Gone, LedgerDamaged, LedgerError, StaleDataset
from block_store.ledger.breaker import BUDGET_S, Breaker
from block_store.ledger.codec import SealItem
from block_store.ledger.joining import Joining
from block_store.ledger.lane import Attempt, OrderedLane
from block_store.ledger.lease import BEAT_S, Lease
from block_store.ledger.scripts import (
    CHUNK,
    LEASE_S,
    RELEASE_CHUNK,
    TICKET_LEASE_S,
    LedgerScripts,
    Standing,
    chunks,
)
from common.ticket import TicketId
from common.types import BlockRef, Epoch

_LOG = logging.getLogger(__name__)


class LedgerClient:
    """A worker's incarnation in the ledger. Thread-safe. More than a dozen methods: one for every operation.

    Once fenced every call but `release` and `close` raises Fenced; register a new one with a new writer slot. Errors of
    all calls: LedgerUnavailable (no answer in time, or the breaker is open), StaleDataset (the ledger was built anew,
    or will be: `lease.on_stale` runs in the beat thread until it says that the holder has rejoined).
    """

    def __init__(self, lane: OrderedLane, lease: Lease, writer_slot: int, floor: int) -> None:
        self.lane = lane
        self.lease = lease
        self._writer_slot = writer_slot
        self._floor = floor
        self._joining: Joining | None = None

    @classmethod
    def register(
        cls, ledger: LedgerScripts, name: str, *, writer_slot: int, floor: int = 0, lease_s: float = LEASE_S,
        beat_s: float | None = BEAT_S, budget_s: float = BUDGET_S,
        on_fenced: Callable[[], None] = lambda: None,
    ) -> LedgerClient:  # fmt: skip
        """A new holder with its beat thread (`beat_s` None: none). `on_fenced` runs once, in the thread that learns it.

        Errors: FloorsExceedArena, StaleDataset, LedgerUnavailable.
        """
        epoch = ledger.register(name, writer_slot=writer_slot, floor=floor, lease_s=lease_s)
        lane = OrderedLane(ledger, name, epoch, budget_s)
        lane.on_fenced = on_fenced
        lease = Lease(lane, lease_s)
        lease.beat()
        if beat_s is not None:
            lease.start(beat_s)
        return cls(lane, lease, writer_slot, floor)

    @property
    def ledger(self) -> LedgerScripts:
        """Where calls go."""
        return self.lane.ledger

    @property
    def name(self) -> str:
        """The worker's."""
        return self.lane.name

    @property
    def epoch(self) -> Epoch:
        """The incarnation; another one after `join`."""
        return self.lane.epoch

    @property
    def fenced(self) -> threading.Event:
        """Set once nothing is this holder's any more."""
        return self.lane.fenced

    @property
    def breaker(self) -> Breaker:
        """Open while the ledger is not asked."""
        return self.lane.breaker

    def alloc(self, num_blocks: int) -> list[BlockRef]:
        """RESERVED blocks; raise their header generation before the first store. Fenced, Exhausted: none taken."""
        refs: list[BlockRef] = []
        try:
            while (wanted := num_blocks - len(refs)) > 0:
                refs += self.lane.call(
                    lambda call, wanted=wanted: self.ledger.alloc(call, min(CHUNK, wanted), wanted)  # type: ignore[misc]
                )
        except Exhausted:
            self.release(refs)
            raise
        return refs

    def seal(self, items: Sequence[SealItem]) -> list[BlockRef]:
        """The reference to use from now on for each item, of which there are at most CHUNK: its own, or the one that is
        indexed already (then both are held).
        """
        # In a generation a block is sealed once: every seal of it is the same call.
        key = ("seal", *(item.ref for item in items))
        return self.lane.call(lambda call: self.ledger.seal(call, items), key)

    def acquire(self, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """References on the longest prefix that is there for every group, per group; at most CHUNK hashes."""
        return self.lane.call(lambda call: self.ledger.acquire(call, hashes_by_group))

    def hand_over(self, refs: Sequence[BlockRef], attempt: Attempt, ticket_lease_s: float = TICKET_LEASE_S) -> TicketId:
        """A ticket on `refs`, which are still held here too. Fenced, Stale, NotHolder; after LedgerUnavailable it may
        be made again.
        """
        while attempt.ticket is None or attempt.num_answered * CHUNK < len(refs):
            first = attempt.num_answered * CHUNK
            part = refs[first : first + CHUNK]
            try:
                attempt.ticket = self.lane.call(
                    lambda call, part=part: self.ledger.hand_over(call, part, ticket_lease_s, attempt.ticket),  # type: ignore[misc]
                    (attempt, attempt.num_answered),
                )
            except Gone:  # its lease ended between two calls, or the ledger was built anew
                attempt.ticket, attempt.num_answered = None, 0
            else:
                attempt.num_answered += 1
        return attempt.ticket

    def claim(self, ticket: TicketId, attempt: Attempt) -> list[BlockRef]:
        """Everything the ticket holds. Fenced, Gone; after LedgerUnavailable it may be made again. Until it is over,
        `attempt.refs` has what it got, and `unfetched` what it has got unheard.
        """
        more = True
        while more:
            part, more = self.lane.call(lambda call: self.ledger.claim(call, ticket), (attempt, attempt.num_answered))
            attempt.refs += part
            attempt.num_answered += 1
        return attempt.refs

    def unfetched(self, attempt: Attempt) -> list[BlockRef]:
        """What an unanswered call of this claim got, as a later call found out; until it is made again."""
        settled = self.lane.settled((attempt, attempt.num_answered))
        return cast(tuple[list[BlockRef], bool], settled)[0] if settled else []

    def forget(self, attempt: Attempt) -> None:
        """Nobody makes this hand-over or claim again: a ticket that it has begun, or is found to have begun, is ended.
        What a claim has got is for the caller to release.
        """
        attempt.is_over = True
        late = self.lane.forget((attempt, attempt.num_answered))
        for ticket in (attempt.ticket, late):
            if isinstance(ticket, TicketId):
                self.give_up(ticket)

    def give_up(self, ticket: TicketId) -> None:
        """Ends a ticket; if the ledger does not answer it is left to its lease."""
        self.lane.give_up(ticket)

    def release(self, refs: Sequence[BlockRef]) -> None:
        """Gives up `refs` (chains head first, let go of from their tails on). Says that writes into them are complete.
        No refusal, not even when fenced.
        """
        try:
            for part in reversed(list(chunks(refs, RELEASE_CHUNK))):
                self.lane.call(lambda call, part=part: self.ledger.release(call, part))  # type: ignore[misc]
        except Fenced:
            return

    def holdings_after(self, place: int) -> tuple[list[BlockRef], int]:
        """As of the ledger, after a call that is still unanswered was repeated. Fenced."""
        return self.lane.call(lambda call: self.ledger.holdings_after(call.epoch, place), changes=False)

    def holdings(self) -> list[BlockRef]:
        """What the ledger says is held here, all of it. Fenced."""
        return self.lane.call(lambda call: self.ledger.holdings(call.epoch), changes=False)

    def holds(self, refs: Sequence[BlockRef]) -> list[bool]:
        """Which of at most CHUNK references the ledger says are held here. Fenced."""
        return self.lane.call(lambda call: self.ledger.holds(call.epoch, refs), changes=False)

    def contradict(self, reason: str) -> None:
        """Of blocks that the ledger gave this holder the header says that they were reallocated: as `distrust`.

        Fenced: the lease was over, so that others may have got them.
        """
        try:
            self.ledger.distrust(self.epoch)
        except Fenced:
            self.lane.fence()
            raise
        except LedgerError as error:
            _LOG.warning("could not ask for a rebuild: %s", error)
        self.breaker.open(f"it must be built anew: {reason}")

    def assert_held(self, dataset: str, refs: Sequence[BlockRef]) -> dict[BlockRef, Standing]:
        """Registers under a ledger that was built anew and asserts `refs` there: everything that is held, may be
        written, or is in reserve here. Calls go there from `join` on. Takes no lock; for one thread.

        Errors: as `register`; the next try goes on where this one ended.
        """
        if self._joining is None or self._joining.ledger.dataset != dataset:
            self._joining = Joining(self.ledger.under(dataset))
        try:
            self._joining.register(self.name, self._writer_slot, self._floor, self.lease.lease_s)
            return self._joining.assert_all(refs, self.lease.lease_s)
        except (Fenced, StaleDataset):
            self._joining = None
            raise
        except LedgerDamaged:
            with suppress(LedgerError):
                self._joining.ledger.distrust()
            raise

    def join(self) -> None:
        """Calls go to the ledger in which everything was asserted."""
        assert self._joining is not None and self._joining.epoch is not None
        self.lane.restart(self._joining.ledger, self._joining.epoch, self._joining.number)
        self._joining = None

    def close(self) -> None:
        """Ends the beats and gives everything back. Say so only when this process writes no more."""
        self.lease.end()
        try:
            self.ledger.unregister(self.epoch)
        except LedgerError as error:
            _LOG.warning("holder %s could not unregister, its lease will run out: %s", self.name, error)
        self.fenced.set()
