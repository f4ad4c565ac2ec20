"""Sends requests at given times, whether or not earlier requests have been answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import gevent
from gevent.pool import Group

Send = Callable[[int, float], None]
"""A function that sends request `number`, which was due `late_s` seconds ago, and waits for the answer."""


class Replay:
    """A sender of a process's share of the requests: of every `shares`-th request, beginning with number `share`. The
    arrival times are in seconds since `start`.
    """

    def __init__(self, arrivals: Iterable[float], share: int, shares: int, send: Send) -> None:
        self._arrivals, self._share, self._shares, self._send = arrivals, share, shares, send
        self._flying = Group()
        self._sender: gevent.Greenlet | None = None
        self.done = False
        """Whether every request of the share was sent and has ended."""

    def start(self) -> None:
        self._sender = gevent.spawn(self._run)

    def _run(self) -> None:
        started = time.perf_counter()
        for number, at_s in enumerate(self._arrivals):
            if number % self._shares == self._share:
                gevent.sleep(max(0.0, started + at_s - time.perf_counter()))
                self._flying.spawn(self._send, number, time.perf_counter() - started - at_s)
        self._flying.join()
        self.done = True

    def stop(self, timeout_s: float) -> None:
        """Stops sending, waits up to `timeout_s` seconds for answers, and cuts off the remaining requests."""
        if self._sender is not None:
            self._sender.kill()
        self._flying.join(timeout_s)
        self._flying.kill()
