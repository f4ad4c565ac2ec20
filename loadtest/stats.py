"""Reports the times of one streamed request to locust and to the load test's own record.

Locust counts a request once, as `e2e`. Times to first token (`ttft`), gaps (`itl`) and mean times per later token
(`tpot`) are entries of locust's statistics, but not of its totals, so that these totals count only requests. Depends on
locust's interfaces, not on gRPC or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loadtest.metrics import LATE_S, Record, Slo

Fire = Callable[..., Any]
"""locust's `environment.events.request.fire`."""
LogPart = Callable[[str, str, float, int], Any]
"""A function that adds a time to an entry of locust's statistics. Takes the entry's name, the protocol, the time in
milliseconds and the number of tokens.
"""


@dataclass(frozen=True, slots=True)
class Collector:
    """The destinations to which the timers of a process report."""

    fire: Fire
    log_part: LogPart
    record: Record
    slo: Slo
    clock: Callable[[], float] = time.perf_counter


class StreamTimer:
    """A timer of one stream, created when the request is sent. It reports the time to the first token, the gap before
    each later message with tokens, and, at the end, the time of the whole request.
    """

    def __init__(
        self, collector: Collector, protocol: str, prompt_len: int, *, late_s: float | None = None, cut: bool = False
    ) -> None:
        """Starts the timer. `protocol` is the request type by which locust groups the entries. `late_s` is the time
        since the request was due, or None if it was not due at a certain time. `cut` says whether the request was
        shortened to fit the model.
        """
        self._collector = collector
        self._protocol = protocol
        self._prompt_len = prompt_len
        self._start = self._first = self._last = collector.clock()
        self.num_tokens = 0
        for tally in collector.record.at(time.time()):
            tally.sent += 1
            tally.cut += cut
            if late_s is not None:
                tally.late += late_s > LATE_S
                tally.observe("late", late_s)

    def tokens(self, count: int) -> None:
        """Notes that `count` new tokens have arrived. The first tokens determine the TTFT, and each later call adds a
        gap.
        """
        now = self._collector.clock()
        if count == 0:
            return
        is_first = self.num_tokens == 0
        self._part("ttft" if is_first else "itl", now - self._last, count)
        for tally in self._collector.record.at(time.time()):
            tally.tokens_in += self._prompt_len if is_first else 0
            tally.tokens_out += count
        self._first = now if is_first else self._first
        self._last = now
        self.num_tokens += count

    def done(self, num_tokens: int | None = None) -> None:
        """Notes that the stream has ended successfully, or reports a failure if no token has arrived. `num_tokens` is
        the server's count of tokens, if it sent one; unlike the timer's, it includes tokens without text.
        """
        unseen = max(0, (num_tokens or 0) - self.num_tokens)
        if self.num_tokens == 0:
            self.failed("EMPTY", RuntimeError("the stream ended without a token"))
            return
        self.num_tokens += unseen
        times = {"ttft": self._first - self._start, "e2e": self._collector.clock() - self._start}
        if self.num_tokens > 1:
            times["tpot"] = (self._last - self._first) / (self.num_tokens - 1)
            self._part("tpot", times["tpot"], self.num_tokens)
        for tally in self._collector.record.at(time.time()):
            tally.answered += 1
            tally.tokens_out += unseen
            tally.good += self._collector.slo.met(times)
            tally.observe("e2e", times["e2e"])
        self._fire(times["e2e"])

    def failed(self, status: str, error: BaseException) -> None:
        """Notes that the stream has failed. `status` is the name under which the failure is counted."""
        for tally in self._collector.record.at(time.time()):
            tally.failed[status] = tally.failed.get(status, 0) + 1
        self._fire(self._collector.clock() - self._start, error)

    def _part(self, name: str, seconds: float, size: int) -> None:
        for tally in self._collector.record.at(time.time()):
            tally.observe(name, seconds)
        self._collector.log_part(name, self._protocol, seconds * 1e3, size)

    def _fire(self, seconds: float, error: BaseException | None = None) -> None:
        self._collector.fire(
            request_type=self._protocol,
            name="e2e",
            response_time=seconds * 1e3,  # locust counts in milliseconds
            response_length=self.num_tokens,
            exception=error,
            context={},
        )
