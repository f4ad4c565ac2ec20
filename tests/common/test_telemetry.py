"""Log lines in JSON; fallbacks are logged once, and counted for the process."""

from __future__ import annotations

import io
import json
import logging
import queue
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest

from common import telemetry
from common.request_ids import REQUEST_ID
from common.telemetry import (
    Burst,
    Fallbacks,
    configure_logging,
    count_fallbacks_of,
    fallback_counts,
    log_format_of,
)


@pytest.fixture
def restored_root() -> Iterator[logging.Logger]:
    """The root logger, whose handlers and level are restored at the end of the test."""
    root, given = logging.getLogger(), REQUEST_ID.get()
    before, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = before
    root.setLevel(level)
    REQUEST_ID.set(given)


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


def test_a_json_line_says_when_who_and_for_which_request(restored_root: logging.Logger) -> None:
    with redirect_stderr(io.StringIO()) as written:
        configure_logging("INFO", "json", service="gateway")
        REQUEST_ID.set("r-1")
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("requests").exception("it %s", "failed")
    [line] = written.getvalue().splitlines()
    event = json.loads(line)
    assert event | {"time": 0, "exception": 0} == {
        "time": 0, "level": "error", "service": "gateway", "logger": "requests", "message": "it failed",
        "request_id": "r-1", "exception": 0,
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", event["time"]) and "two" in event["exception"]
    assert log_format_of(restored_root) == "json", "the ranks of a worker log in its format"


def test_a_burst_is_told_at_once_and_the_next_one_by_itself() -> None:
    told: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    burst = Burst(told.put, wait_s=0.2)
    for item in range(50):
        burst.note(item)
    assert told.get(timeout=60) == list(range(50))
    burst.note(50)
    assert told.get(timeout=60) == [50] and told.empty()
