"""Predicts how long a request will wait for its place: the work ahead of the request, divided by the rate of work.
Callers pass the current time.

A request's work is the largest number of tokens that it may use. Both the queue and the rate count this number, so
estimates that are too high largely cancel out. The rate counts time only while the service is busy, so idle time does
not change the rate.

Places do not become free evenly, and prompts wait for each other at the workers. The prediction therefore includes a
margin, which is learned from the waits of earlier requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

MEMORY_S = 20.0
"""Time constant of the rate, in busy seconds."""
MIN_BUSY_S = 1.0
MIN_DONE = 16
"""A rate is reported after `MIN_BUSY_S` busy seconds and `MIN_DONE` completed requests."""
_MEAN_WEIGHT = 0.05
_QUANTILE = 0.98
"""Share of the requests that should wait no longer than predicted."""
_STEP = 0.1
"""Step size of the margin: this number of seconds, plus this share of the margin itself."""


class Mark(NamedTuple):
    """The time at which a request got its place."""

    at: float
    """Seconds on the clock of `pass_time`."""
    busy_s: float
    """Busy seconds up to that time."""


class ServiceRate:
    """An estimate of the work, in tokens, that the service does per busy second."""

    def __init__(self) -> None:
        self._at = 0.0
        self._busy = False
        self._total_busy_s = 0.0
        self._busy_s = 0.0
        self._work = 0.0
        self._num_done = 0
        self._mean_cost = 0.0

    @property
    def per_second(self) -> float | None:
        """The rate in tokens per busy second, or None until `MIN_BUSY_S` and `MIN_DONE` are reached."""
        if self._busy_s < MIN_BUSY_S or self._num_done < MIN_DONE or not self._work:
            return None
        return self._work / self._busy_s

    @property
    def mean_cost(self) -> float:
        """The moving average of a sequence's cost in tokens."""
        return self._mean_cost

    def note_cost(self, cost: int, weight: int) -> None:
        """Notes that a request of `weight` sequences, which costs `cost` tokens, has arrived."""
        each = cost / weight
        self._mean_cost += (each - self._mean_cost) * (_MEAN_WEIGHT if self._mean_cost else 1.0)

    def pass_time(self, now: float, *, busy: bool) -> None:
        """Advances the time to `now`, in seconds. Must be called whenever `busy` changes. The `busy` of the previous
        call applies up to `now`, and the `busy` of this call applies after that.
        """
        if self._busy and now > self._at:
            self._total_busy_s += now - self._at
            keep = math.exp((self._at - now) / MEMORY_S)
            self._work *= keep
            self._busy_s = self._busy_s * keep + MEMORY_S * (1.0 - keep)
        self._at, self._busy = now, busy

    def mark(self) -> Mark:
        """Returns the time of the last `pass_time`, to be passed to `done`."""
        return Mark(self._at, self._total_busy_s)

    def done(self, work: int, began: Mark) -> None:
        """Notes that a request gave up its place at the time of the last `pass_time`. The request's work counts in
        proportion to the busy share of the time for which it had its place.
        """
        whole_s, busy_s = self._at - began.at, self._total_busy_s - began.busy_s
        if busy_s > 0:
            self._work += work * busy_s / whole_s
            self._num_done += 1


class Margin:
    """The number of seconds that is added to predictions, so that nearly all requests wait no longer than predicted.
    After each request, the margin moves by one step towards the quantile `_QUANTILE` of the prediction errors.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def learn(self, predicted_s: float, waited_s: float) -> None:
        """Adjusts the margin after a request has waited. `predicted_s` does not include the margin."""
        step = _STEP * (1.0 + self.seconds)
        above = waited_s > predicted_s + self.seconds
        self.seconds = max(0.0, self.seconds + step * (_QUANTILE if above else _QUANTILE - 1.0))


def work_before(tenant: str, work: Mapping[str, float], quantum: int) -> float:
    """Returns an upper bound on the waiting `work` (in tokens, by tenant) that is done before a new request of `tenant`
    begins. Tenants take turns of one `quantum` each. The request waits for at most as much of each other tenant's work
    as `tenant` itself has waiting, plus one turn.
    """
    own = work.get(tenant, 0.0)
    return own + sum(min(other, own + quantum) for name, other in work.items() if name != tenant)
