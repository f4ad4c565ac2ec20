"""Fallbacks are logged once, and counted for the process."""

from __future__ import annotations

import logging
import queue
from collections import Counter

import pytest

from common import telemetry
from common.telemetry import Burst, Fallbacks, count_fallbacks_of, fallback_counts


def test_a_fallback_is_logged_once_and_counted_with_those_of_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "_COUNTS", Counter())
    monkeypatch.setattr(telemetry, "_SOURCES", [])
    one, other = Fallbacks(logging.getLogger("one")), Fallbacks(logging.getLogger("other"))
    for fallbacks, name in ((one, "slow"), (one, "slow"), (one, "late"), (other, "slow")):
        fallbacks.note(name, "why")
    assert [record.name for record in caplog.records] == ["one", "one", "other"]
    assert one.counts == {"slow": 2, "late": 1} and other.counts == {"slow": 1}
    elsewhere = {"slow": 4, "kernel": 1}
    count_fallbacks_of(lambda: elsewhere)
    assert fallback_counts() == {"slow": 7, "late": 1, "kernel": 1}
    elsewhere["kernel"] = 2
    assert fallback_counts()["kernel"] == 2


def test_a_burst_is_told_at_once_and_the_next_one_by_itself() -> None:
    told: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    burst = Burst(told.put, wait_s=0.2)
    for item in range(50):
        burst.note(item)
    assert told.get(timeout=10) == list(range(50))
    burst.note(50)
    assert told.get(timeout=10) == [50] and told.empty()
