"""Carries a worker's blocks over an outage of the ledger: it does not answer, comes back, or was built anew.

It has the reserve, repeats the calls that were missed, and asserts what is held after a rebuild. To it the held blocks
are a set; `HeldBlocks` counts their uses.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from block_store.arena.arena import Arena
from block_store.arena.header import FixedHeader
from block_store.arena.writer_slots import WriterSlot
from block_store.errors import ArenaLost, Exhausted, Fenced, HeaderAheadError, LedgerUnavailable, Stale, StaleDataset
from block_store.ledger.client import Attempt, LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.scripts import CHUNK, Standing
from common.telemetry import Fallbacks
from common.types import BlockRef

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")
L = TypeVar("L", bound="OutageBuffer")


def locked(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """For whatever must not come between the two halves of a rejoining, nor it between theirs."""

    @wraps(method)
    def run(self: L, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class OutageBuffer:
    """The side of `HeldBlocks` that faces the ledger. One thread, and beside it the holder's beat thread."""

    def __init__(self, holder: LedgerClient, arena: Arena, writer_slot: WriterSlot, reserve: int = 0) -> None:
        self.holder = holder
        self.arena = arena
        self.writer_slot = writer_slot
        self.fallbacks = Fallbacks(_LOG)
        """What was done without the ledger, counted by kind."""
        self._lock = threading.RLock()
        self._rebuild_count = arena.rebuild_count
        self._late_seals: list[list[SealItem]] = []
        """Sealed in the header, not yet in the ledger."""
        self._wanted: set[Attempt] = set()
        """Claims that were not answered and will be made again."""
        holder.on_stale = self.rejoin
        holder.on_answer = self.settle_up
        self._least_reserve = self._reserve_target = reserve
        self._reserve: dict[BlockRef, None] = {}
        """In the order in which they are taken from it."""
        self._counts: Counter[BlockRef] = Counter()
        self._unsure = False
        """The ledger may hold references for us that we know nothing of."""

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
        # Steps go on meanwhile. They get nothing new, since the old ledger refuses: what is held can only get less.
        standings = self.holder.assert_held(fixed.dataset, self._everything())
        with self._lock:
            self.holder.join()
            self._rebuild_count = fixed.rebuild_count
            self._settle_standings(standings)
            self._unsure = True  # what was given up meanwhile
        return True

    @locked
    def _everything(self) -> list[BlockRef]:
        return [*self._counts, *self._reserve]

    def _settled_page(self) -> FixedHeader:
        """The header's fixed page, not while it is being written."""
        while (page := self.arena.fixed) != self.arena.fixed:
            continue
        return page

    def _settle_standings(self, standings: dict[BlockRef, Standing]) -> None:
        """What was lost can still be read, by the reader rule, until its header changes; nobody writes into it."""
        self._reserve = {ref: None for ref in self._reserve if standings[ref] is Standing.UNSEALED}
        late = [[item for item in items if standings.get(item.ref) is Standing.UNSEALED] for items in self._late_seals]
        self._late_seals = [items for items in late if items]
        if lost := sum(standings[ref] is Standing.LOST for ref in self._counts):
            self.fallbacks.note("block lost in a rebuild", f"{lost} of {len(standings)}")

    def settle_up(self) -> None:
        """Repeat the calls that the ledger has missed, fill the reserve, report to `fsck`. This runs in the beat
        thread, in parts: between two of them a step can use the ledger.
        """
        if self.holder.fenced.is_set():
            return
        self._reconcile()
        self._level_reserve()
        if self.holder.census:
            self._report(self.holder.census)

    def _level_reserve(self) -> None:
        """Towards its target, as far as blocks are available."""
        try:
            while (missing := self._reserve_target - len(self._reserve)) > 0:
                with self._lock:
                    self._take(min(missing, CHUNK))
                self.holder.keep_lease()
        except (Exhausted, LedgerUnavailable):
            return
        if (surplus := len(self._reserve) - 2 * self._reserve_target - CHUNK) > 0:
            self._give_back(surplus)

    @locked
    def _give_back(self, num_blocks: int) -> None:
        """Blocks of the reserve, those that came last."""
        refs = list(self._reserve)[len(self._reserve) - num_blocks :]
        for ref in refs:
            del self._reserve[ref]
        self._release_all(refs)

    def _refill(self, num_blocks: int) -> None:
        """At least `num_blocks` in the reserve, and beyond them the least reserve if that is free; the rest comes with
        the next beat.
        """
        self._check_fence()
        missing = num_blocks - len(self._reserve)
        wanted = missing + self._least_reserve
        if wanted <= 0:
            return
        try:
            self._take(min(wanted, max(missing, CHUNK)))
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
        if any(ref.generation >> 32 != self._rebuild_count for ref in refs):
            self._contradicted(reason := "a generation that this ledger cannot issue")
            raise LedgerUnavailable(reason)
        try:
            self.arena.raise_generations(refs, self.writer_slot.number)
        except HeaderAheadError as error:
            if self.arena.is_lost:
                raise ArenaLost(f"arena {self.arena.arena_id} is lost") from error
            self._contradicted(str(error))
            raise LedgerUnavailable(str(error)) from error
        # A rebuild that began since then may not have seen us in the header (`rebuild`): these are not ours.
        if self.arena.rebuild_count != self._rebuild_count:
            raise LedgerUnavailable("the ledger is built anew")
        self._reserve.update(dict.fromkeys(refs))

    def _contradicted(self, reason: str) -> None:
        """The header is ahead of the ledger, so that this is an older one: write nothing, ask for a rebuild. Fenced."""
        self._unsure = True
        self.holder.contradict(reason)
        self.fallbacks.note("rebuild asked for", reason)

    def _release_all(self, refs: Sequence[BlockRef]) -> None:
        if not refs:
            return
        try:
            self._call(lambda: self.holder.release(refs))
            self.holder.num_available += len(refs)
        except LedgerUnavailable as error:  # `_reconcile` makes up for it
            self.fallbacks.note("release not acknowledged", str(error))

    def _call(self, operation: Callable[[], T]) -> T:
        """One operation of the ledger. After an unanswered one the two sides may differ, until `_reconcile`."""
        self._check_fence()
        try:
            self._seal_late()
            return operation()
        except StaleDataset as error:
            self._unsure = True
            raise LedgerUnavailable(f"the ledger is built anew: {error}") from error
        except LedgerUnavailable:
            self._unsure = True
            raise

    def _seal_late(self) -> None:
        """Before anything else: blocks that no sequence has any more may still serve others."""
        while self._late_seals and not self.holder.breaker.is_open:
            try:
                self.holder.seal(self._late_seals[0])
                self._unsure = True  # the references on blocks that had the hash already
            except Stale as error:
                self.fallbacks.note("late seal refused", str(error))
            self._late_seals.pop(0)

    def _reconcile(self) -> None:
        """After unanswered calls: releases what the ledger holds for us and we know nothing of."""
        if not (self._unsure or self._late_seals):
            return
        with self._lock:
            self._call(lambda: None)
            self._unsure = False
        try:
            for part in self._ledger_side():
                with self._lock:
                    self._release_all([ref for ref in part if not self._knows(ref)])
        except BaseException:
            self._unsure = True
            raise

    def _ledger_side(self) -> Iterable[list[BlockRef]]:
        """What the ledger says is held here, piece by piece. A reference of an answered call is known here by the time
        the lock is free.
        """
        part, place = self.holder.holdings_after(0)
        while part:
            yield part
            self.holder.keep_lease()
            part, place = self.holder.holdings_after(place)

    def _knows(self, ref: BlockRef) -> bool:
        return (
            ref in self._counts
            or ref in self._reserve
            or any(ref in attempt.refs or ref in self.holder.unfetched(attempt) for attempt in self._wanted)
        )

    def _report(self, census: str) -> None:
        """What differs is looked at again with nothing under way."""
        believed = set(self._everything())
        surplus: list[BlockRef] = []
        for part in self._ledger_side():
            surplus += [ref for ref in part if ref not in believed]
            believed.difference_update(part)
        with self._lock:
            missing = self._missing([ref for ref in believed if self._knows(ref)][:CHUNK])
            surplus = [ref for ref in surplus if not self._knows(ref)][:CHUNK]
            lasting = [ref for ref, held in zip(surplus, self.holder.holds(surplus), strict=True) if held]
            self.holder.ledger.report(self.holder.epoch, census, missing, lasting)

    def _missing(self, refs: list[BlockRef]) -> list[BlockRef]:
        return [ref for ref, held in zip(refs, self.holder.holds(refs), strict=True) if not held]

    def _check_fence(self) -> None:
        if self.holder.fenced.is_set():
            raise Fenced(f"holder {self.holder.name} is fenced or closed")
