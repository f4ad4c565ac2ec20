"""A holder's lease in the ledger. A separate thread, the beat thread, extends the lease with beats (heartbeats). The
callbacks of `holder.rejoin` run in this thread: they repeat unanswered calls after an outage, and join a rebuilt
ledger.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from block_store.errors import Fenced, LedgerDamaged, LedgerError, LedgerUnavailable, StaleDataset
from block_store.ledger.breaker import PROBE_S
from block_store.ledger.lane import OrderedLane
from common.telemetry import Fallbacks

_LOG = logging.getLogger(__name__)
BEAT_S = 1.0
MOST_PROBE_PAUSE_S = 8 * PROBE_S
"""Longest pause, in seconds, between two attempts to join a new ledger. A failed attempt doubles the pause, up to this
length.
"""


class Lease:
    """A holder's lease, and the ledger's answer to the last beat. Only one thread at a time may call `beat`."""

    def __init__(self, lane: OrderedLane, lease_s: float) -> None:
        self.lease_s = lease_s
        self.on_stale: Callable[[], bool] = lambda: False
        """Callback that joins the rebuilt ledger. It returns whether the holder has joined."""
        self.on_answer: Callable[[], object] = lambda: None
        """Callback that `probe` runs after its beat has been answered."""
        self.num_available = 0
        """Number of blocks that could still be allocated at the last beat, adjusted for later allocations and releases.
        """
        self.census = ""
        """Name of the census that the last beat reported; empty if there is no census."""
        self._lane = lane
        self._beaten_at = 0.0
        self._probe_pause_s = PROBE_S
        self._fallbacks = Fallbacks(_LOG)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, beat_s: float) -> None:
        """Starts the beat thread, which sends beats until `end` is called or the holder is fenced. The pause between
        two beats is `beat_s` seconds; while the breaker is open, it is the pause between two probes.
        """
        name = f"beat-{self._lane.name}"
        self._thread = threading.Thread(target=self._beat_on, args=(beat_s,), name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the beats, and waits for the end of the beat thread, unless that thread makes this call."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def beat(self) -> None:
        """Extends the lease now. If the holder has ended, marks it as fenced and raises Fenced. Can also raise
        StaleDataset, LedgerDamaged and LedgerUnavailable.
        """
        self._beaten_at = time.monotonic()
        lane = self._lane
        try:
            self.num_available, self.census = lane.ledger.beat(lane.epoch, self.lease_s, lane.answered)
        except Fenced:
            lane.fence()
            raise

    def keep(self) -> None:
        """Sends a beat if the last one is older than a fifth of the lease. Call it during long work in the beat
        thread.
        """
        if time.monotonic() - self._beaten_at > self.lease_s / 5:
            self.beat()

    def probe(self) -> None:
        """Sends a beat, rejoins if the ledger has been rebuilt, and opens or closes the breaker. Raises Fenced if the
        lease has ended.
        """
        lane = self._lane
        try:
            self.beat()
            lane.breaker.close()
            self.on_answer()
        except StaleDataset as error:
            lane.breaker.open(error)
            self._rejoin()
        except LedgerDamaged as error:
            lane.distrust(error)
        except LedgerUnavailable as error:
            lane.breaker.open(error)

    def _beat_on(self, beat_s: float) -> None:
        lane = self._lane
        while not self._stop.wait(self._probe_pause_s if lane.breaker.is_open else beat_s) and not lane.fenced.is_set():
            try:
                self.probe()
            except Fenced as error:
                _LOG.error("holder %s is fenced: %s", lane.name, error)
            except Exception:  # if the thread ended, the lease would end, and every request of the worker would be lost
                _LOG.exception("a beat of %s failed; the next one follows", lane.name)

    def _rejoin(self) -> None:
        try:
            if self.on_stale():
                _LOG.warning("holder %s has joined the new ledger as epoch %d", self._lane.name, self._lane.epoch)
                self._probe_pause_s = PROBE_S
                self._lane.breaker.close()
        except LedgerError as error:
            self._probe_pause_s = min(2 * self._probe_pause_s, MOST_PROBE_PAUSE_S)
            self._fallbacks.note("new ledger not joined yet", f"{self._lane.name}: {error}")
