"""The time of a step as a function of its number of rows, from recent steps. This module reads no clock.

The time for a number of rows is the median of the latest steps with that number, but at most the time for a larger
number, because steps of rare sizes are often disturbed. If there are too few recent steps with a number, its time is
estimated from neighboring numbers. A wrong estimate is corrected after a few steps with that number, or forgotten.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import accumulate

KEPT = 9
"""Maximum number of times that are kept for each number of rows."""
LEAST = 3
"""Number of times that are needed for a median. A single time may have been disturbed."""
MAX_AGE = 64
"""Every MAX_AGE times, those for a number of rows are dropped if none of the last MAX_AGE timed steps had that number.
The machine's load may have changed since. A time that is too long would never be corrected, because the number would
not be chosen.
"""
_SHARE = 0.5
"""Assumed cost of an additional row, before it is measured, as a part of a row's share of the whole step."""


class StepTimes:
    """A record of the times of recent steps, in seconds, by number of rows."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._noted_at: dict[int, int] = {}
        self._rows: list[int] = []
        """The numbers of rows that have a median, ascending."""
        self._least: list[float] = []
        """For each of them, the least median of this number and of all larger ones; empty until it is needed."""
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
        self._least = []

    def knows(self, num_rows: int) -> bool:
        """Returns whether there are enough recent times for this number of rows to have a median."""
        return num_rows in self._medians

    def at(self, num_rows: int) -> float:
        """Returns the estimated time of a step with this number of rows in seconds, or 0.0 without any median."""
        if not self._rows:
            return 0.0
        if not self._least:
            self._least = list(accumulate(map(self._medians.__getitem__, reversed(self._rows)), min))[::-1]
        place = bisect_left(self._rows, num_rows)
        at = min(place, len(self._rows) - 1)
        nearest = self._rows[at]
        if 0 < place == at and nearest != num_rows:
            low, least = self._rows[at - 1], self._least[at - 1]
            return least + (num_rows - low) / (nearest - low) * (self._least[at] - least)
        return self._least[at] * (1 + _SHARE * (num_rows - nearest) / nearest)

    def _forget_old(self) -> None:
        for num_rows in [rows for rows, at in self._noted_at.items() if self._num_steps - at >= MAX_AGE]:
            del self._times[num_rows], self._noted_at[num_rows]
            if self._medians.pop(num_rows, None) is not None:
                self._rows.remove(num_rows)
