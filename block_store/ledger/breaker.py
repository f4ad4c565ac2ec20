"""A circuit breaker for Redis, and the time budget of a worker's ledger call (docs/design.md, Ledger: without Redis).

A call that is not answered within its budget opens the breaker. After that, calls fail at once, so that no step waits.
The breaker closes when a beat is answered again, or when the holder has joined a rebuilt ledger (`lease.Lease`).
"""

from __future__ import annotations

import logging
import threading
import time

from common.telemetry import LOG_EVERY_S

_LOG = logging.getLogger(__name__)
BUDGET_S = 0.25
"""Time in seconds after which an unanswered call is not repeated, and the breaker opens. A call takes about a
millisecond, but on a busy machine Redis may have to wait for a core: on two cores with 32 users, a budget of 50 ms
opened the breaker six times in a minute.
"""
PROBE_S = 0.1
"""Seconds between probes while the breaker is open."""


class Breaker:
    """A circuit breaker that counts openings and refused calls, and logs at most one outage in LOG_EVERY_S seconds.
    Several threads may use it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = threading.Event()
        self._closed.set()
        self._opened_at = 0.0
        self._said_at = -LOG_EVERY_S
        self.num_opened = 0
        self.num_refused = 0

    @property
    def is_open(self) -> bool:
        return not self._closed.is_set()

    def refuses(self) -> bool:
        """Returns whether the next call must be refused because the breaker is open, and counts it if so."""
        self.num_refused += self.is_open
        return self.is_open

    def open(self, reason: object) -> None:
        """Opens the breaker, because Redis did not answer, or because the ledger has been or must be rebuilt."""
        if not self.is_open:
            self._closed.clear()
            self._opened_at = time.monotonic()
            self.num_opened += 1
            if self._opened_at - self._said_at >= LOG_EVERY_S:
                self._said_at = self._opened_at
                _LOG.warning("%s continues without the ledger (outage %d): %s", self._name, self.num_opened, reason)

    def close(self) -> None:
        """Closes the breaker, because the ledger can be used again."""
        if self.is_open:
            self._closed.set()
            if self._said_at == self._opened_at:
                _LOG.warning("%s can use the ledger again after %.1f s", self._name, time.monotonic() - self._opened_at)
