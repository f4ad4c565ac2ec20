"""The tables of the chaos suite: good and bad rows, and the upper bound of a probability after no failures."""

from __future__ import annotations

from testing.chaos.report import Report, percentile


def test_a_zero_stands_beside_its_bound_and_one_event_is_bad() -> None:
    report = Report("none", 2000, 1)
    report.none("wrong answers", 0, 2000, "requests")
    assert report.good and "0 of 2,000 requests, rate < 0.0015" in report.text()
    report.none("wrong answers", 1, 2000, "requests")
    assert not report.good and "BAD  wrong answers" in report.text() and "1 of 2,000 requests   " in report.text()


def test_limits_hold_on_their_side() -> None:
    for value, good in ((1.9, True), (2.0, True), (2.1, False)):
        report = Report("kill", 1, 1)
        report.at_most("gap", value, 2.0, "s")
        assert report.good == good
        report = Report("stale", 1, 1)
        report.at_least("found", -value, -2.0)
        assert report.good == good


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(100)]
    assert percentile(values, 0.99) == 99.0 and percentile(values, 0.5) == 50.0 and percentile([], 0.5) == 0.0
