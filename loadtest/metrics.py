"""The counters and histograms of a load test, in a form that can be added up over processes.

A `Record` contains the totals and one tally for each interval of time, for charts. Worker processes send the tallies of
the intervals to locust's master, which adds them up. Percentiles are therefore those of all observations. This module
depends on neither locust nor a protocol.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

GROWTH = 1.02
"""The ratio between the bounds of a histogram's buckets. Quantiles are exact to 1 %."""
LATE_S = 0.05
"""A request that is sent this much after its time is counted as late."""
CELL_S = 5
"""The length of an interval in seconds, at first. `Record.add` doubles it while there are more than MOST_CELLS."""
MOST_CELLS = 240
TIMES = ("ttft", "itl", "tpot", "e2e")
"""The names of the histograms that requests have."""


@dataclass(slots=True)
class Histogram:
    """Counts of positive values in buckets of equal ratio. `merge` adds the values of another histogram."""

    counts: dict[int, int] = field(default_factory=dict)
    total: float = 0.0
    most: float = 0.0

    def add(self, value: float) -> None:
        bucket = round(math.log(max(value, 1e-6)) / math.log(GROWTH))
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.total += value
        self.most = max(self.most, value)

    def merge(self, other: Histogram) -> None:
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.total += other.total
        self.most = max(self.most, other.most)

    def __len__(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> float:
        """Returns the value below which `share` of the values lie, to 1 %, or NaN without values."""
        left = min(len(self) - 1, int(len(self) * share))
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left < 0:
                return min(GROWTH**bucket, self.most)
        return math.nan


@dataclass(slots=True)
class Tally:
    """The observations of an interval or of a whole run. Times are in seconds."""

    sent: int = 0
    answered: int = 0
    good: int = 0
    """Requests that were answered within the limits of the SLO."""
    late: int = 0
    cut: int = 0
    """Requests of a trace that were shortened because they did not fit the model."""
    tokens_in: int = 0
    """Tokens of the prompts for which a first output token has arrived."""
    tokens_out: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    """Failures by status."""
    times: dict[str, Histogram] = field(default_factory=dict)
    """Histograms by name: those of `TIMES` and, for open-loop requests, "late", the delay with which they were sent."""

    def observe(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, Histogram()).add(seconds)

    def merge(self, other: Tally) -> None:
        for name in ("sent", "answered", "good", "late", "cut", "tokens_in", "tokens_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for status, count in other.failed.items():
            self.failed[status] = self.failed.get(status, 0) + count
        for name, histogram in other.times.items():
            self.times.setdefault(name, Histogram()).merge(histogram)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Tally:
        """Returns the tally that `asdict` has converted to `data`."""
        times = {name: Histogram(**histogram) for name, histogram in data["times"].items()}
        return cls(**{**data, "times": times})


class Record:
    """The tallies of a run: one for the whole run, and one for each interval."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.total = Tally()
        self.width_s = CELL_S
        self.cells: dict[int, Tally] = {}
        """Tallies by the start of their interval, in seconds since the epoch."""
        self.first_s, self.last_s = math.inf, -math.inf
        """The times of the first and of the last observation."""

    def at(self, now_s: float) -> Iterator[Tally]:
        """Yields the tallies that an observation at this time belongs to."""
        self.first_s, self.last_s = min(self.first_s, now_s), max(self.last_s, now_s)
        yield self.total
        yield self._cell(now_s)
        self._fit()

    def _cell(self, now_s: float) -> Tally:
        return self.cells.setdefault(int(now_s // self.width_s) * self.width_s, Tally())

    def take(self) -> dict[str, Any]:
        """Returns the record as data for a message, and clears the record. The data contain no totals, which `add`
        computes from the intervals.
        """
        data = {
            "cells": {start: asdict(cell) for start, cell in self.cells.items()},
            "span": [self.first_s, self.last_s],
        }
        self.clear()
        return data

    def add(self, data: dict[str, Any]) -> None:
        """Adds the data that `take` of another record returned."""
        self.first_s, self.last_s = min(self.first_s, data["span"][0]), max(self.last_s, data["span"][1])
        for start, cell in data["cells"].items():
            tally = Tally.of(cell)
            self.total.merge(tally)
            self._cell(start).merge(tally)
        self._fit()

    def _fit(self) -> None:
        """Widens the intervals until there are at most MOST_CELLS."""
        while len(self.cells) > MOST_CELLS:
            self.width_s *= 2
            cells, self.cells = self.cells, {}
            for start, cell in cells.items():
                self._cell(start).merge(cell)


@dataclass(frozen=True, slots=True)
class Slo:
    """The limits that a request must meet, in seconds, and the share of the requests that must meet all of them."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    share: float = 0.9

    @property
    def limits(self) -> dict[str, float]:
        given = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return {name: limit for name, limit in given.items() if limit is not None}

    def met(self, times: dict[str, float]) -> bool:
        """Returns whether an answered request meets all limits. A request with one token has no TPOT, and meets that
        limit.
        """
        return all(times.get(name, 0.0) <= limit for name, limit in self.limits.items())
