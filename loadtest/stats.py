"""Reports the times of one streamed request to locust as separate events: ttft, itl (one per gap), e2e.

Depends on locust's event interface, not on gRPC or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Fire = Callable[..., Any]
"""locust's `environment.events.request.fire`."""


class StreamTimer:
    """A timer of one stream, created when the request is sent. It reports the time to the first token, the gap before
    each later message with tokens, and, at the end, the time of the whole request.
    """

    def __init__(self, fire: Fire, protocol: str, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts the timer. `protocol` is the request type by which locust groups events. `clock` returns seconds."""
        self._fire = fire
        self._protocol = protocol
        self._clock = clock
        self._start = self._last = clock()
        self.num_tokens = 0

    def tokens(self, count: int) -> None:
        """Notes that `count` new tokens have arrived. The first tokens determine the TTFT, and each later call adds a
        gap.
        """
        now = self._clock()
        if count == 0:
            return
        self._report("ttft" if self.num_tokens == 0 else "itl", now - self._last, count)
        self._last = now
        self.num_tokens += count

    def done(self) -> None:
        """Notes that the stream has ended successfully. A stream without tokens is a failure."""
        if self.num_tokens == 0:
            self.failed(RuntimeError("the stream ended without a token"))
            return
        self._report("e2e", self._clock() - self._start, self.num_tokens)

    def failed(self, error: Exception) -> None:
        """Notes that the stream was refused or broke."""
        self._report("e2e", self._clock() - self._start, self.num_tokens, error)

    def _report(self, name: str, seconds: float, size: int, error: Exception | None = None) -> None:
        self._fire(
            request_type=self._protocol,
            name=name,
            response_time=seconds * 1000.0,  # locust counts in milliseconds
            response_length=size,
            exception=error,
            context={},
        )
