"""The sweep: every half second it ends silent holders and frees quarantined blocks whose writers are dead.

A thread of the store, the only caller of `reap`. Knows nothing of gRPC.
"""

from __future__ import annotations

import logging
import threading

from block_store.arena import Arena
from block_store.errors import LedgerUnavailable, StaleDataset
from block_store.ledger import Ledger, ReapReport
from block_store.registry import StoreRecord, WorkerRegistry

_LOG = logging.getLogger(__name__)
SWEEP_S = 0.5


def sweep(ledger: Ledger, arena: Arena, waiting_slots: tuple[int, ...]) -> ReapReport:
    """One sweep. `waiting_slots`: those of the last report; their locks are looked at before the call, as `reap` asks.

    What enters quarantine from a process that is dead already is freed at once by a second call.
    """
    report = ledger.reap([slot for slot in waiting_slots if not arena.is_writer_alive(slot)])
    if report.reaped and (dead := [slot for slot in report.waiting_slots if not arena.is_writer_alive(slot)]):
        again = ledger.reap(dead)
        freed = report.num_unquarantined + again.num_unquarantined
        return ReapReport(report.reaped + again.reaped, freed, again.postponed, again.waiting_slots)
    return report


class Reaper:
    """Sweeps, and publishes the store's record, until stopped."""

    def __init__(self, ledger: Ledger, arena: Arena, registry: WorkerRegistry, record: StoreRecord) -> None:
        self._ledger = ledger
        self._arena = arena
        self._registry = registry
        self._record = record
        self._stop = threading.Event()
        self._waiting: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._run, name="reaper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the sweeps and takes the record out."""
        self._stop.set()
        self._thread.join()
        try:
            self._registry.withdraw_store(self._record.arena_id)
        except LedgerUnavailable as error:
            _LOG.warning("the store's record could not be withdrawn: %s", error)

    def _run(self) -> None:
        while True:
            try:
                self._registry.publish_store(self._record)
                self._note(sweep(self._ledger, self._arena, self._waiting))
            except LedgerUnavailable as error:
                _LOG.warning("no sweep: %s", error)
            except StaleDataset:
                _LOG.error("Redis has lost the ledger of arena %s; restart the services", self._record.arena_id)
            except Exception:
                _LOG.exception("the sweep failed; the next one comes")
            if self._stop.wait(SWEEP_S):
                return

    def _note(self, report: ReapReport) -> None:
        self._waiting = report.waiting_slots
        if report.postponed:
            _LOG.warning("the last sweep was too long ago: every lease is renewed, nobody is reaped")
        if report.reaped or report.num_unquarantined:
            _LOG.info("reaped holders %s, freed %d blocks", list(report.reaped), report.num_unquarantined)
