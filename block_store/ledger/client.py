"""A holder's client of the ledger. It has an epoch, a lease (`lease`), and an ordered sequence of calls (`lane`). A
repeated call takes effect only once.

`alloc`, `hand_over`, `claim`, `release`, `present`, `holdings` and `assert_held` make several calls if there are more
blocks than one call accepts. Other methods accept at most CHUNK blocks. `HeldBlocks` counts the sequences that use the
blocks.
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
from block_store.ledger.lane import Attempt, OrderedLane, ticket_in
from block_store.ledger.lease import BEAT_S, Lease
from block_store.ledger.replies import Standing
from block_store.ledger.scripts import (
    CHUNK,
    LEASE_S,
    RELEASE_CHUNK,
    TICKET_LEASE_S,
    LedgerScripts,
    chunks,
)
from common.ticket import TicketId
from common.types import BlockRef, Epoch

_LOG = logging.getLogger(__name__)


class LedgerClient:
    """A client of the ledger for one incarnation of a worker. Thread-safe, except `assert_held` and `join`.

    Once the holder is fenced, calls in the lane raise Fenced, which `release` ignores; register a new incarnation with
    a new writer slot. These calls can also raise LedgerUnavailable (there is no answer in time, the breaker is open, or
    the ledger is damaged) and StaleDataset (the ledger has been or will be rebuilt; the beat thread calls
    `lease.on_stale` until the holder has rejoined).
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
        """Registers a new holder. Starts its beat thread unless `beat_s` is None. `on_fenced` runs in the thread that
        learns of the fence.

        Raises FloorsExceedArena if the floors would not fit into the arena, and Fenced if the lease has ended before
        the first beat. Can also raise StaleDataset, LedgerDamaged and LedgerUnavailable.
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
        """The ledger to which calls are sent."""
        return self.lane.ledger

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.lane.name

    @property
    def epoch(self) -> Epoch:
        """The current epoch of the holder. `join` changes it."""
        return self.lane.epoch

    @property
    def fenced(self) -> threading.Event:
        """An event that is set once the holder is fenced or closed."""
        return self.lane.fenced

    @property
    def breaker(self) -> Breaker:
        """The breaker. While it is open, calls in the lane fail at once."""
        return self.lane.breaker

    def alloc(self, num_blocks: int, spare: int = 0) -> list[BlockRef]:
        """Returns RESERVED blocks. The caller must raise their header generations before it writes into them.

        Raises Exhausted if `spare` more blocks could not be allocated afterwards. If this method raises Exhausted, no
        blocks remain allocated. After LedgerUnavailable, `holdings` may contain
        blocks that were allocated but not returned.
        """
        refs: list[BlockRef] = []
        try:
            while (wanted := num_blocks - len(refs)) > 0:
                refs += self.lane.call(
                    lambda call, wanted=wanted: self.ledger.alloc(call, min(CHUNK, wanted), wanted + spare)  # type: ignore[misc]
                )
        except Exhausted:
            self.release(refs)
            raise
        return refs

    def seal(self, items: Sequence[SealItem]) -> list[BlockRef]:
        """Seals at most CHUNK items. Returns, for each item, the reference to use from then on: the given reference, or
        a reference to a block that already has the hash. In the second case, the holder has both references.
        """
        # A block is sealed once per generation, so two seals of a reference are the same call.
        key = ("seal", *(item.ref for item in items))
        return self.lane.call(lambda call: self.ledger.seal(call, items), key)

    def acquire(self, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """Takes references to the longest prefix that is indexed for every group, and returns them per group. The
        prefix ends before the first block that would use up another worker's floor. Accepts at most CHUNK hashes.
        """
        return self.lane.call(lambda call: self.ledger.acquire(call, hashes_by_group))

    def present(self, hashes: Sequence[bytes]) -> list[bool]:
        """Returns, for each prefix hash, whether a block is indexed under it. Takes no references."""
        return self.lane.call(lambda call: self.ledger.present(hashes), changes=False)

    def hand_over(self, refs: Sequence[BlockRef], attempt: Attempt, ticket_lease_s: float = TICKET_LEASE_S) -> TicketId:
        """Returns a ticket that holds `refs`. The holder keeps its own references to these blocks. Raises Stale if a
        block is not sealed or has a different generation, and NotHolder if the holder lacks any of `refs`.
        After LedgerUnavailable, the call may be repeated with the same `attempt`.
        """
        while attempt.ticket is None or attempt.num_answered * CHUNK < len(refs):
            first = attempt.num_answered * CHUNK
            part = refs[first : first + CHUNK]
            try:
                attempt.ticket = self.lane.call(
                    lambda call, part=part: self.ledger.hand_over(call, part, ticket_lease_s, attempt.ticket),  # type: ignore[misc]
                    (attempt, attempt.num_answered),
                )
            except Gone:  # the ticket's lease has ended between two calls, or the ledger has been rebuilt
                attempt.ticket, attempt.num_answered = None, 0
            else:
                attempt.num_answered += 1
        return attempt.ticket

    def deliver(self, items: Sequence[SealItem], attempt: Attempt) -> list[BlockRef]:
        """Seals at most CHUNK items and moves them to the ticket of `attempt`. The first delivery creates the ticket.
        Returns, for each item, the reference that the ticket holds. Raises Stale if the holder is not writing one of
        the blocks, and Gone if the ticket has ended. Do not repeat the call after LedgerUnavailable; call `forget`
        instead.
        """
        key = (attempt, attempt.num_answered)
        attempt.ticket, refs = self.lane.call(lambda call: self.ledger.deliver(call, items, attempt.ticket), key)
        attempt.num_answered += 1
        return refs

    def claim(self, ticket: TicketId, attempt: Attempt) -> list[BlockRef]:
        """Takes over all references of the ticket, and returns them. Raises Gone if the ticket has been claimed or has
        ended, or if its secret is wrong.

        After LedgerUnavailable, the call may be repeated with the same `attempt`. Until the claim is complete,
        `attempt.refs` lists the references that it has obtained, and `unfetched` returns those that an unanswered call
        has obtained.
        """
        more = True
        while more:
            part, more = self.lane.call(lambda call: self.ledger.claim(call, ticket), (attempt, attempt.num_answered))
            attempt.refs += part
            attempt.num_answered += 1
        return attempt.refs

    def unfetched(self, attempt: Attempt) -> list[BlockRef]:
        """Returns the references that an unanswered call of this claim obtained, if a later call has recovered the
        answer. Otherwise, or if the claim has been repeated since, returns an empty list.
        """
        settled = self.lane.settled((attempt, attempt.num_answered))
        return cast(tuple[list[BlockRef], bool], settled)[0] if settled else []

    def forget(self, attempt: Attempt) -> None:
        """Declares that this hand-over, delivery or claim will not be repeated. Ends the ticket of a hand-over or
        delivery, even if an answer names the ticket only later. The caller must release the references of a claim.
        """
        attempt.is_over = True
        late = self.lane.forget((attempt, attempt.num_answered))
        for ticket in (attempt.ticket, ticket_in(late)):
            if ticket is not None:
                self.give_up(ticket)

    def give_up(self, ticket: TicketId) -> None:
        """Ends a ticket. If the ledger cannot be used now, the ticket ends with its lease."""
        self.lane.give_up(ticket)

    def release(self, refs: Sequence[BlockRef]) -> None:
        """Gives up `refs`. The caller must have finished its writes to these blocks. `refs` lists the head of a chain
        first; the tail is released first.

        References that the holder does not have are ignored, and a fenced holder gets no error.
        """
        try:
            for part in reversed(list(chunks(refs, RELEASE_CHUNK))):
                self.lane.call(lambda call, part=part: self.ledger.release(call, part))  # type: ignore[misc]
        except Fenced:
            return

    def holdings_after(self, place: int) -> tuple[list[BlockRef], int]:
        """Returns the result of `LedgerScripts.holdings_after`, after repeating an unanswered call if there is one.
        Raises Fenced if the holder is fenced.
        """
        return self.lane.call(lambda call: self.ledger.holdings_after(call.epoch, place), changes=False)

    def holdings(self) -> list[BlockRef]:
        """Returns all references that the ledger records for this holder. Raises Fenced if the holder is fenced."""
        return self.lane.call(lambda call: self.ledger.holdings(call.epoch), changes=False)

    def holds(self, refs: Sequence[BlockRef]) -> list[bool]:
        """Returns, for each of at most CHUNK references, whether the ledger records it for this holder. Raises Fenced
        if the holder is fenced.
        """
        return self.lane.call(lambda call: self.ledger.holds(call.epoch, refs), changes=False)

    def contradict(self, reason: str) -> None:
        """Requests a rebuild, because the header contradicts the ledger about blocks that the ledger gave to this
        holder, and opens the breaker.

        Raises Fenced if the lease has ended, because the blocks may then have been given to others.
        """
        try:
            self.ledger.distrust(self.epoch)
        except Fenced:
            self.lane.fence()
            raise
        except LedgerError as error:
            _LOG.warning("could not ask for a rebuild: %s", error)
        self.breaker.open(f"it must be rebuilt: {reason}")

    def assert_held(self, dataset: str, refs: Sequence[BlockRef]) -> dict[BlockRef, Standing]:
        """Registers the holder in the rebuilt ledger `dataset`, asserts `refs` in it, and returns the standings of the
        blocks. `refs` must contain all blocks that this worker uses, may write to or keeps in reserve. Call `join`
        afterwards. Not thread-safe. Raises FloorsExceedArena if the floors do not fit into the arena, and Fenced if the
        new holder's lease has ended. Can also raise StaleDataset, LedgerDamaged and LedgerUnavailable. After
        LedgerUnavailable, the next call with this `dataset` continues where this call ended.
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
        """Directs all later calls to the ledger in which `assert_held` has asserted the blocks."""
        assert self._joining is not None and self._joining.epoch is not None
        self.lane.restart(self._joining.ledger, self._joining.epoch, self._joining.number)
        self._joining = None

    def close(self) -> None:
        """Ends the beats and the holder. If the ledger does not answer, the holder ends with its lease. Call this
        method only when this process no longer writes.
        """
        self.lease.end()
        try:
            self.ledger.unregister(self.epoch)
        except LedgerError as error:
            _LOG.warning("holder %s could not unregister; its lease will expire: %s", self.name, error)
        self.fenced.set()
