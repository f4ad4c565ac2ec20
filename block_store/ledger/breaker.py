"""Whether Redis may be asked: a circuit breaker, and the budget of a worker's ledger call (docs/design.md,
Ledger: without Redis).

One call that got no answer within its budget opens it; from then on calls fail at once, so that a step never waits,
until a beat got through again (the thread of `lease.Lease` probes). Independent of what is called.
"""

from __future__ import annotations

import logging
import threading
import time

from common.telemetry import LOG_EVERY_S

_LOG = logging.getLogger(__name__)
BUDGET_S = 0.25
"""Most of what a step may wait for Redis, once; then the breaker is open. A call takes a millisecond, but on two cores
that all services and a load generator share, Redis itself waits for a core: with 50 ms the breaker opened six
times in a minute of 32 users, for up to 2.3 s, and requests waited for it."""
PROBE_S = 0.1
"""How often an open breaker is tried."""


class Breaker:
    """Thread-safe. Counts how often it opened and how many calls it refused; says so once in LOG_EVERY_S at most."""

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
        """`is_open`, asked before a call: counted."""
        self.num_refused += self.is_open
        return self.is_open

    def open(self, reason: object) -> None:
        """Redis gave no answer, or one that voids the ledger."""
        if not self.is_open:
            self._closed.clear()
            self._opened_at = time.monotonic()
            self.num_opened += 1
            if self._opened_at - self._said_at >= LOG_EVERY_S:
                self._said_at = self._opened_at
                _LOG.warning("%s goes on without the ledger (time %d): %s", self._name, self.num_opened, reason)

    def close(self) -> None:
        """The ledger answers."""
        if self.is_open:
            self._closed.set()
            if self._said_at == self._opened_at:
                _LOG.warning("%s has the ledger again after %.1f s", self._name, time.monotonic() - self._opened_at)
