"""Makes a worker and the ledger agree again: after calls that were not answered, and after the ledger was built anew.

Runs in the beat thread, in parts: between two of them a step can use the ledger. To it the blocks in use are a set;
`HeldBlocks` counts their uses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from block_store.arena.header import FixedHeader
from block_store.holder.outage import OutageCalls, locked
from block_store.holder.reserve import Reserve
from block_store.ledger.lane import Attempt
from block_store.ledger.scripts import CHUNK, Standing
from common.types import BlockRef


class Rejoining:
    """The comparison of what is held here with what the ledger says is held here."""

    def __init__(
        self, calls: OutageCalls, reserve: Reserve, in_use: Mapping[BlockRef, int], wanted: set[Attempt]
    ) -> None:
        """`in_use`: what sequences here have. `wanted`: claims that were not answered and will be made again. Both are
        the caller's, which goes on changing them.
        """
        self._calls = calls
        self._reserve = reserve
        self._in_use = in_use
        self._wanted = wanted
        calls.holder.lease.on_stale = self.rejoin
        calls.holder.lease.on_answer = self.settle_up

    @property
    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        return self._calls.lock

    def rejoin(self) -> bool:
        """Asserts what is held here in the ledger that the header names, if that is another one than before.

        False: there is none yet, or (then the holder is fenced) there will be none. Errors: LedgerError; try again. In
        the beat thread, while a step may run: what it writes into is among what is asserted.
        """
        holder, fixed = self._calls.holder, self._settled_page()
        if fixed.is_lost:
            holder.lane.fence()
            return False
        if fixed.dataset == holder.ledger.dataset:
            return False
        # Steps go on meanwhile. They get nothing new, since the old ledger refuses: what is held can only get less.
        standings = holder.assert_held(fixed.dataset, self._everything())
        with self.lock:
            holder.join()
            self._calls.rebuild_count = fixed.rebuild_count
            self._settle_standings(standings)
            self._calls.is_unsure = True  # what was given up meanwhile
        return True

    def settle_up(self) -> None:
        """Repeat the calls that the ledger has missed, level the reserve, report to `fsck`."""
        holder = self._calls.holder
        if holder.fenced.is_set():
            return
        self.reconcile()
        self._reserve.level()
        if holder.lease.census:
            self._report(holder.lease.census)

    def reconcile(self) -> None:
        """After unanswered calls: releases what the ledger holds for us and we know nothing of."""
        calls = self._calls
        if not (calls.is_unsure or calls.late_seals):
            return
        with self.lock:
            calls.call(lambda: None)
            calls.is_unsure = False
        try:
            for part in self._ledger_side():
                with self.lock:
                    calls.release([ref for ref in part if not self._knows(ref)])
        except BaseException:
            calls.is_unsure = True
            raise

    @locked
    def _everything(self) -> list[BlockRef]:
        return [*self._in_use, *self._reserve]

    def _settled_page(self) -> FixedHeader:
        """The header's fixed page, not while it is being written."""
        arena = self._calls.arena
        while (page := arena.fixed) != arena.fixed:
            continue
        return page

    def _settle_standings(self, standings: dict[BlockRef, Standing]) -> None:
        """What was lost can still be read, by the reader rule, until its header changes; nobody writes into it."""
        self._reserve.keep_only(lambda ref: standings[ref] is Standing.UNSEALED)
        late = [
            [item for item in items if standings.get(item.ref) is Standing.UNSEALED] for items in self._calls.late_seals
        ]
        self._calls.late_seals = [items for items in late if items]
        if lost := sum(standings[ref] is Standing.LOST for ref in self._in_use):
            self._calls.fallbacks.note("block lost in a rebuild", f"{lost} of {len(standings)}")

    def _ledger_side(self) -> Iterable[list[BlockRef]]:
        """What the ledger says is held here, piece by piece. A reference of an answered call is known here by the time
        the lock is free.
        """
        holder = self._calls.holder
        part, place = holder.holdings_after(0)
        while part:
            yield part
            holder.lease.keep()
            part, place = holder.holdings_after(place)

    def _knows(self, ref: BlockRef) -> bool:
        return (
            ref in self._in_use
            or ref in self._reserve
            or any(ref in attempt.refs or ref in self._calls.holder.unfetched(attempt) for attempt in self._wanted)
        )

    def _report(self, census: str) -> None:
        """What differs is looked at again with nothing under way."""
        holder, believed = self._calls.holder, set(self._everything())
        surplus: list[BlockRef] = []
        for part in self._ledger_side():
            surplus += [ref for ref in part if ref not in believed]
            believed.difference_update(part)
        with self.lock:
            missing = self._missing([ref for ref in believed if self._knows(ref)][:CHUNK])
            surplus = [ref for ref in surplus if not self._knows(ref)][:CHUNK]
            lasting = [ref for ref, held in zip(surplus, holder.holds(surplus), strict=True) if held]
            holder.ledger.report(holder.epoch, census, missing, lasting)

    def _missing(self, refs: list[BlockRef]) -> list[BlockRef]:
        return [ref for ref, held in zip(refs, self._calls.holder.holds(refs), strict=True) if not held]
