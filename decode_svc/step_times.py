"""The time of a step as a function of its number of rows, from recent steps. This module reads no clock.

The time for a number of rows is the median of the latest steps with that number. If there are too few recent steps with
a number, its time is estimated from neighboring numbers. A wrong estimate is corrected after a few steps with that
number.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

KEPT = 9
"""Maximum number of times that are kept for each number of rows."""
LEAST = 3
"""Number of times that are needed for a median. A single time may have been disturbed."""
MAX_AGE = 512
"""Every MAX_AGE steps, the times for a number of rows are dropped if none of the last MAX_AGE steps had that number.
The machine's load may have changed since.
"""
_SHARE = 0.5
"""Assumed cost of an additional row, before it is measured, as a part of a row's share of the whole step."""


class StepTimes:
    """A record of the times of recent steps, in seconds, by number of rows."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._noted_at: dict[int, int] = {}
        self._rows: list[int] = []  # numbers of rows that have a median, ascending
        self._num_steps = 0

    def note(self, num_rows: int, seconds: float) -> None:
        """Records the time of a step with this number of rows."""
        self._num_steps += 1
        times = self._times.setdefault(num_rows, deque(maxlen=KEPT))
        times.append(seconds)
        if len(times) >= LEAST:
            if num_rows not in self._medians:
                insort(self._rows, num_rows)
            self._medians[num_rows] = sorted(times)[len(times) // 2]
        self._noted_at[num_rows] = self._num_steps
        if self._num_steps % MAX_AGE == 0:
            self._forget_old()

    def knows(self, num_rows: int) -> bool:
        """Returns whether there are enough recent times for this number of rows to have a median."""
        return num_rows in self._medians

    def at(self, num_rows: int) -> float:
        """Returns the estimated time of a step with this number of rows in seconds, or 0.0 without any median."""
        if (known := self._medians.get(num_rows)) is not None:
            return known
        if not self._rows:
            return 0.0
        place = bisect_left(self._rows, num_rows)
        if 0 < place < len(self._rows):
            low, high = self._rows[place - 1 : place + 1]
            share = (num_rows - low) / (high - low)
            return self._medians[low] + share * (self._medians[high] - self._medians[low])
        nearest = self._rows[min(place, len(self._rows) - 1)]
        return self._medians[nearest] * (1 + _SHARE * (num_rows - nearest) / nearest)

    def _forget_old(self) -> None:
        for num_rows in [rows for rows, at in self._noted_at.items() if self._num_steps - at >= MAX_AGE]:
            del self._times[num_rows], self._noted_at[num_rows]
            if self._medians.pop(num_rows, None) is not None:
                self._rows.remove(num_rows)
