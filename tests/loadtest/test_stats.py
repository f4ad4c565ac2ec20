"""The times of a stream: ttft, a gap for each later message, tpot and e2e. Failures are counted as failures."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.metrics import Record, Slo
from loadtest.stats import Collector, StreamTimer


class Recorder:
    """A receiver of locust's events and entries, with a manual clock."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.parts: list[tuple[str, int, int]] = []
        self.now = 100.0
        self.record = Record()

    def fire(self, **event: Any) -> None:
        self.events.append(event)

    def log_part(self, name: str, protocol: str, ms: float, tokens: int) -> None:
        assert protocol == "grpc"
        self.parts.append((name, round(ms), tokens))

    def timer(self, slo: Slo | None = None, **about: Any) -> StreamTimer:
        collector = Collector(self.fire, self.log_part, self.record, slo or Slo(), clock=lambda: self.now)
        return StreamTimer(collector, "grpc", 40, **about)

    def stream(self, timer: StreamTimer, *steps: tuple[float, int]) -> None:
        for wait, count in steps:
            self.now += wait
            timer.tokens(count)


def test_first_token_gaps_and_the_whole() -> None:
    recorder = Recorder()
    timer = recorder.timer()
    recorder.stream(timer, (0.5, 1), (0.1, 0), (0.1, 2), (0.3, 1))
    timer.done()
    assert recorder.parts == [("ttft", 500, 1), ("itl", 200, 2), ("itl", 300, 1), ("tpot", 167, 4)]
    (event,) = recorder.events
    assert (event["name"], round(event["response_time"]), event["response_length"]) == ("e2e", 1000, 4)
    assert event["exception"] is None and event["request_type"] == "grpc"
    total = recorder.record.total
    assert (total.sent, total.answered, total.tokens_in, total.tokens_out) == (1, 1, 40, 4)
    assert {name: len(times) for name, times in total.times.items()} == {"ttft": 1, "itl": 2, "tpot": 1, "e2e": 1}


def test_tokens_that_no_message_showed_are_counted() -> None:
    recorder = Recorder()
    timer = recorder.timer()
    recorder.stream(timer, (0.5, 1), (0.4, 1))
    timer.done(5)
    assert recorder.record.total.tokens_out == 5
    assert recorder.parts[-1] == ("tpot", 100, 5)


@pytest.mark.parametrize("end", ["failed", "empty"])
def test_a_broken_or_empty_stream_is_a_failure(end: str) -> None:
    recorder = Recorder()
    timer = recorder.timer(Slo(ttft_s=60.0))
    recorder.now += 2.0
    if end == "failed":
        timer.tokens(1)
        timer.failed("UNAVAILABLE", RuntimeError("gone"))
    else:
        timer.done()
    (event,) = recorder.events
    assert event["name"] == "e2e" and event["exception"] is not None
    total = recorder.record.total
    assert total.failed == {"UNAVAILABLE" if end == "failed" else "EMPTY": 1}
    assert (total.sent, total.answered, total.good) == (1, 0, 0)


@pytest.mark.parametrize("limit,good", [(0.6, 1), (0.4, 0)])
def test_an_answer_within_the_limits_is_good(limit: float, good: int) -> None:
    recorder = Recorder()
    timer = recorder.timer(Slo(ttft_s=limit))
    recorder.stream(timer, (0.5, 1))
    timer.done()
    assert recorder.record.total.good == good


@pytest.mark.parametrize("late_s,late", [(0.05, 0), (0.2, 1)])
def test_a_request_that_is_sent_late_is_counted(late_s: float, late: int) -> None:
    recorder = Recorder()
    recorder.timer(late_s=late_s, cut=True)
    total = recorder.record.total
    assert (total.late, total.cut, len(total.times["late"])) == (late, 1, 1)
