"""The times of a stream: ttft, a gap for each later message, and e2e. Failures are counted as failures."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.stats import StreamTimer


class Recorder:
    """A receiver of locust's events, with a manual clock."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 100.0

    def fire(self, **event: Any) -> None:
        self.events.append(event)

    def timer(self) -> StreamTimer:
        return StreamTimer(self.fire, "grpc", clock=lambda: self.now)


def test_first_token_gaps_and_the_whole() -> None:
    recorder = Recorder()
    timer = recorder.timer()
    for wait, count in ((0.5, 1), (0.1, 0), (0.1, 2), (0.3, 1)):
        recorder.now += wait
        timer.tokens(count)
    timer.done()
    seen = [(e["name"], round(e["response_time"]), e["response_length"]) for e in recorder.events]
    assert seen == [("ttft", 500, 1), ("itl", 200, 2), ("itl", 300, 1), ("e2e", 1000, 4)]
    assert all(e["exception"] is None and e["request_type"] == "grpc" for e in recorder.events)


@pytest.mark.parametrize("end", ["failed", "empty"])
def test_a_broken_or_empty_stream_is_a_failure(end: str) -> None:
    recorder = Recorder()
    timer = recorder.timer()
    recorder.now += 2.0
    if end == "failed":
        timer.tokens(1)
        timer.failed(RuntimeError("gone"))
    else:
        timer.done()
    last = recorder.events[-1]
    assert last["name"] == "e2e" and last["exception"] is not None
    assert [e["name"] for e in recorder.events].count("e2e") == 1
