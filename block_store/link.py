"""What a worker's blocks have to do with the ledger when it does not answer, comes back, or was built anew.

The reserve; the calls that are made up for; the assertion of what is held after a rebuild. Knows how blocks are counted
only as a set: `held.HeldBlocks` counts them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from block_store.arena import Arena
from block_store.codec import SealItem
from block_store.errors import ArenaLost, Exhausted, Fenced, HeaderAheadError, LedgerUnavailable, Stale, StaleDataset
from block_store.header import FixedHeader
from block_store.holder import Holder
from block_store.ledger import MAX_BATCH, Standing
from block_store.writer_slots import WriterSlot
from common.telemetry import Fallbacks
from common.types import BlockRef, TicketId

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
L = TypeVar("L", bound="LedgerLink")


def locked(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """For whatever must not come between the two halves of a rejoining, nor it between theirs."""

    @wraps(method)
    def run(self: L, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class LedgerLink:
    """The side of `HeldBlocks` that faces the ledger. One thread, and beside it the holder's beat thread."""

    def __init__(self, holder: Holder, arena: Arena, writer_slot: WriterSlot, reserve: int = 0) -> None:
        self.holder = holder
        self.arena = arena
        self.writer_slot = writer_slot
        self.fallbacks = Fallbacks(_LOG)
        """What was done without the ledger, counted by kind."""
        self._lock = threading.RLock()
        self._rebuild_count = arena.rebuild_count
        self._late_seals: list[list[SealItem]] = []
        """Sealed in the header, not yet in the ledger."""
        self._wanted: set[TicketId] = set()
        """Tickets whose claim was not answered and will be made again."""
        holder.on_stale = self.rejoin
        holder.on_answer = self.settle_up
        self._reserve_target = reserve
        self._reserve: deque[BlockRef] = deque()
        self._counts: Counter[BlockRef] = Counter()
        self._unsure = False

    def rejoin(self) -> bool:
        """Asserts what is held here in the ledger that the header names, if that is another one than before.

        False: there is none yet, or (then the holder is fenced) there will be none. Errors: LedgerError; try again. In
        the beat thread, while a step may run: what it writes into is among what is asserted.
        """
        fixed = self._settled_page()
        if fixed.is_lost:
            self.holder.fence()
            return False
        if fixed.dataset == self.holder.ledger.dataset:
            return False
        with self._lock:
            refs = [*self._counts, *self._reserve]
            standings = self.holder.rejoin(fixed.dataset, refs)
            self._rebuild_count = fixed.rebuild_count
            self._settle_standings(dict(zip(refs, standings, strict=True)))
            self._unsure = True  # late seals
        return True

    def _settled_page(self) -> FixedHeader:
        """The header's fixed page, not while it is being written."""
        while (page := self.arena.fixed) != self.arena.fixed:
            continue
        return page

    def _settle_standings(self, standings: dict[BlockRef, Standing]) -> None:
        """What was lost can still be read, by the reader rule, until its header changes; nobody writes into it."""
        self._reserve = deque(ref for ref in self._reserve if standings[ref] is Standing.UNSEALED)
        late = [[item for item in items if standings.get(item.ref) is Standing.UNSEALED] for items in self._late_seals]
        self._late_seals = [items for items in late if items]
        if lost := sum(standing is Standing.LOST for standing in standings.values()):
            self.fallbacks.note("block lost in a rebuild", f"{lost} of {len(standings)}")

    def settle_up(self) -> None:
        """Makes up for what the ledger has not heard, and reports to `fsck`; in the beat thread, between two calls."""
        if self.holder.fenced.is_set() or not (self._unsure or self.holder.census):
            return
        with self._lock:
            self._call(lambda: None)
            if self.holder.census:
                self.holder.ledger.report(self.holder.epoch, self.holder.census, [*self._counts, *self._reserve])

    def _refill(self, num_blocks: int) -> None:
        """At least `num_blocks` in the reserve, the target beyond them if it can be had."""
        self._check_fence()
        missing = num_blocks - len(self._reserve)
        wanted = missing + self._reserve_target
        if wanted <= 0:
            return
        try:
            self._take(min(wanted, max(missing, MAX_BATCH)))
        except Exhausted:
            if missing <= 0 or missing == wanted:
                raise
            self._take(missing)

    def _take(self, num_blocks: int) -> None:
        """Blocks of the ledger into the reserve, entered in the header at once: a rebuild must see whose they are."""
        refs = self._call(lambda: self.holder.alloc(num_blocks))
        self.holder.num_available -= num_blocks
        if self.arena.rebuild_count != self._rebuild_count:
            raise LedgerUnavailable("the ledger is built anew")
        try:
            self.arena.raise_generations(refs, self.writer_slot.number)
        except HeaderAheadError as error:
            if self.arena.is_lost:
                raise ArenaLost(f"arena {self.arena.arena_id} is lost") from error
            self._contradicted(str(error))
            raise LedgerUnavailable(str(error)) from error
        # Whoever began a rebuild since then may not have seen us in the header (`rebuild`): these are not ours.
        if self.arena.rebuild_count != self._rebuild_count:
            raise LedgerUnavailable("the ledger is built anew")
        self._reserve.extend(refs)

    def _contradicted(self, reason: str) -> None:
        """The header is ahead of the ledger, so that this is an older one: write nothing, ask for a rebuild. Fenced."""
        self._unsure = True
        self.holder.contradict(reason)
        self.fallbacks.note("rebuild asked for", reason)

    def _release_all(self, refs: Sequence[BlockRef]) -> None:
        for end in range(len(refs), 0, -MAX_BATCH):  # tails first
            part = refs[max(0, end - MAX_BATCH) : end]
            try:
                self._call(lambda part=part: self.holder.release(part))  # type: ignore[misc]
                self.holder.num_available += len(part)
            except LedgerUnavailable as error:  # `_reconcile` makes up for it
                self.fallbacks.note("release not acknowledged", str(error))
                return

    def _call(self, operation: Callable[[], T]) -> T:
        """One ledger call. After an unanswered one the two sides may differ: the ledger's surplus is released first."""
        self._check_fence()
        try:
            if self._unsure:
                self._reconcile()
            return operation()
        except StaleDataset as error:
            self._unsure = True
            raise LedgerUnavailable(f"the ledger is built anew: {error}") from error
        except LedgerUnavailable:
            self._unsure = True
            raise

    def _reconcile(self) -> None:
        """Seals made up for first: blocks that no sequence has any more may still serve others."""
        while self._late_seals:
            try:
                self.holder.seal(self._late_seals[0])
            except Stale as error:
                self.fallbacks.note("late seal refused", str(error))
            self._late_seals.pop(0)
        held = self.holder.holdings()
        known = {
            *self._counts,
            *self._reserve,
            *(ref for ticket in self._wanted for ref in self.holder.unfetched(ticket)),
        }
        surplus = [ref for ref in held if ref not in known]
        for first in range(0, len(surplus), MAX_BATCH):
            self.holder.release(surplus[first : first + MAX_BATCH])
        self._unsure = False

    def _check_fence(self) -> None:
        if self.holder.fenced.is_set():
            raise Fenced(f"holder {self.holder.name} is fenced or closed")
