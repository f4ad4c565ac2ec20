"""Sweeps the ledger about every half second, in a thread of the store. A sweep ends silent holders, and frees
quarantined blocks whose writers are dead. If the ledger is missing, outdated or damaged, or if a different Redis
answers, the thread rebuilds the ledger.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import redis

from block_store.arena.arena import Arena
from block_store.errors import LedgerDamaged, LedgerUnavailable, StaleDataset
from block_store.ledger.rebuild import rebuild
from block_store.ledger.replies import ReapReport
from block_store.ledger.scripts import LedgerScripts
from block_store.redis.redis_server import RedisHandle
from block_store.redis.registry import StoreRecord, WorkerRegistry

_LOG = logging.getLogger(__name__)
SWEEP_S = 0.5


def sweep(ledger: LedgerScripts, arena: Arena, waiting_slots: tuple[int, ...], tick: int = 0) -> ReapReport:
    """Makes one sweep. `waiting_slots` and `tick` come from the last report. The slots' locks are checked before `reap`
    is called, as `reap` requires.

    If holders were reaped and their processes are already dead, calls `reap` again, so that their blocks become free
    without another sweep.
    """
    report = ledger.reap([slot for slot in waiting_slots if not arena.is_writer_alive(slot)], tick=tick)
    if report.reaped and (dead := [slot for slot in report.waiting_slots if not arena.is_writer_alive(slot)]):
        again = ledger.reap(dead, tick=report.tick)
        freed = report.num_unquarantined + again.num_unquarantined
        return replace(again, reaped=report.reaped + again.reaped, num_unquarantined=freed)
    return report


class Reaper:
    """A thread that sweeps, and publishes the store's record, until it is stopped."""

    def __init__(self, ledger: LedgerScripts, arena: Arena, redis: RedisHandle, record: StoreRecord) -> None:
        self._ledger = ledger
        self._arena = arena
        self._redis = redis
        self._registry = WorkerRegistry(redis.client)
        self._record = record
        self._stop = threading.Event()
        self._waiting: tuple[int, ...] = ()
        self._tick = 0
        self._is_silent = False
        self._thread = threading.Thread(target=self._run, name="reaper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the sweeps and withdraws the store's record."""
        self._stop.set()
        self._thread.join()
        try:
            self._registry.withdraw_store(self._record.arena_id)
        except LedgerUnavailable as error:
            _LOG.warning("the store's record could not be withdrawn: %s", error)

    def _run(self) -> None:
        while not self._stop.is_set():
            more = False
            try:
                more = self._sweep()
            except Exception:
                _LOG.exception("the sweep failed; the next one follows")
            if not more:
                self._stop.wait(SWEEP_S)

    def _sweep(self) -> bool:
        """Makes one sweep. Returns whether the next sweep should follow at once."""
        try:
            self._registry.publish_store(self._record)
            report = sweep(self._ledger, self._arena, self._waiting, self._tick)
        except LedgerUnavailable as error:
            return self._look_for_another(error)
        except (StaleDataset, LedgerDamaged) as error:
            _LOG.error("the ledger of arena %s is void (%s) and will be rebuilt", self._record.arena_id, error)
            return self._rebuild()
        self._note(report)
        return report.more

    def _look_for_another(self, error: LedgerUnavailable) -> bool:
        try:
            if self._redis.follow() or self._redis.run_id != self._arena.fixed.run_id:
                _LOG.error("a different Redis answers: the ledger of arena %s will be rebuilt", self._record.arena_id)
                return self._rebuild()
        except (redis.ConnectionError, redis.TimeoutError):
            pass
        if not self._is_silent:
            self._is_silent = True
            _LOG.warning("no sweep: %s (logged once)", error)
        return False

    def _rebuild(self) -> bool:
        try:
            self._redis.follow()
            self._ledger.dataset = rebuild(self._redis.client, self._arena)
        except (redis.ConnectionError, redis.TimeoutError, StaleDataset) as error:
            _LOG.warning("the ledger could not be built; the next sweep tries again: %s", error)
            return False
        self._record = replace(self._record, dataset=self._ledger.dataset, run_id=self._redis.run_id)
        self._waiting, self._tick, self._is_silent = (), 0, False
        return True

    def _note(self, report: ReapReport) -> None:
        self._waiting, self._tick, self._is_silent = report.waiting_slots, report.tick, False
        if report.postponed:
            _LOG.warning("the last sweep is too long ago or in the future: leases are renewed, and no holder is reaped")
        if report.reaped or report.num_unquarantined:
            _LOG.info("reaped holders %s, freed %d blocks", list(report.reaped), report.num_unquarantined)
