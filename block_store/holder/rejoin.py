"""Restores agreement between a worker and the ledger, after unanswered calls and after a rebuild of the ledger.

This work runs in the beat thread, in parts, so that a step can use the ledger between two parts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from block_store.arena.header import FixedHeader
from block_store.holder.outage import OutageCalls, locked
from block_store.holder.reserve import Reserve
from block_store.ledger.lane import Attempt
from block_store.ledger.replies import Standing
from block_store.ledger.scripts import CHUNK
from common.types import BlockRef


class Rejoining:
    """Reconciles a worker's blocks with the ledger's record of them, and asserts the blocks in a rebuilt ledger."""

    def __init__(
        self, calls: OutageCalls, reserve: Reserve, in_use: Mapping[BlockRef, int], wanted: set[Attempt]
    ) -> None:
        """Sets the callbacks of the lease. `in_use` contains the blocks that this worker's sequences use. `wanted`
        contains unanswered claims that will be repeated. The caller owns both and continues to change them.
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
        """Asserts the worker's blocks in the ledger that the header names, if that ledger is new to the worker.

        Returns whether the holder has joined a new ledger. If the arena is lost, fences the holder. The caller must
        retry after a LedgerError. Runs in the beat thread, possibly during a step; the blocks that the step writes are
        asserted too.
        """
        holder, fixed = self._calls.holder, self._settled_page()
        if fixed.is_lost:
            holder.lane.fence()
            return False
        if fixed.dataset == holder.ledger.dataset:
            return False
        # Steps continue. The old ledger refuses their calls, so they get no new blocks, and the set of held blocks only
        # shrinks.
        standings = holder.assert_held(fixed.dataset, self._everything())
        with self.lock:
            holder.join()
            self._calls.rebuild_count = fixed.rebuild_count
            self._settle_standings(standings)
            self._calls.is_unsure = True  # blocks that were given up after they were asserted
        return True

    def settle_up(self) -> None:
        """Repeats unanswered calls, fills the reserve, and reports to `fsck` if `fsck` has asked for a report. Does
        nothing if the holder is fenced.
        """
        holder = self._calls.holder
        if holder.fenced.is_set():
            return
        self.reconcile()
        self._reserve.level()
        if holder.lease.census:
            self._report(holder.lease.census)

    def reconcile(self) -> None:
        """Repeats the late seals, and releases the references that the ledger has for this worker but that are missing
        from the worker's record. Does nothing if there are no late seals and `is_unsure` is False.
        """
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
        """Reads the header's fixed page until two readings agree, because another process may be writing it."""
        arena = self._calls.arena
        while (page := arena.fixed) != arena.fixed:
            continue
        return page

    def _settle_standings(self, standings: dict[BlockRef, Standing]) -> None:
        """Removes from the reserve and the late seals the blocks that the new ledger did not accept as unsealed.

        Lost blocks in use can still be read, under the reader rule, until their headers change.
        """
        self._reserve.keep_only(lambda ref: standings[ref] is Standing.UNSEALED)
        late = [
            [item for item in items if standings.get(item.ref) is Standing.UNSEALED] for items in self._calls.late_seals
        ]
        self._calls.late_seals = [items for items in late if items]
        if lost := sum(standings[ref] is Standing.LOST for ref in self._in_use):
            self._calls.fallbacks.note("block lost in a rebuild", f"{lost} of {len(standings)}")

    def _ledger_side(self) -> Iterable[list[BlockRef]]:
        """Yields the references that the ledger records for this worker, in parts. A caller must take the lock before
        it compares a part with the worker's record, because another thread holds the lock until it has recorded the
        answer to its call.
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
        """Compares the worker's record with the ledger, checks the differences again under the lock, and stores the
        lasting ones for `fsck`.
        """
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
