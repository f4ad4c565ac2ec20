"""How long a request will wait for its place: the work before it over the rate of work. No I/O, no clock.

Work is counted in the tokens that a request may take at most, where it is queued and where it is done, so that a guess
that is too high on the one side is so on the other. Time counts for the rate only while places are taken: an idle
service forgets nothing, and is not taken for a slow one. Places do not become free evenly, and prompts wait for each
other with the workers: how much longer than the mean most requests have waited is measured too, and added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

MEMORY_S = 20.0
"""Busy time over which the rate forgets."""
MIN_BUSY_S = 1.0
MIN_DONE = 16
"""No rate is told before so much has been seen."""
_MEAN_WEIGHT = 0.05
_QUANTILE = 0.98
"""Of all requests so many wait no longer than what is told."""
_STEP = 0.1
"""Seconds, and of the margin itself the share, by which a request moves the margin."""


class Mark(NamedTuple):
    """When a request got its place."""

    at: float
    busy_s: float
    """Busy time until then."""


class ServiceRate:
    """Work done a second while the service was busy. Every method's `now` is in seconds and never goes back."""

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
        """None until enough has been seen."""
        if self._busy_s < MIN_BUSY_S or self._num_done < MIN_DONE or not self._work:
            return None
        return self._work / self._busy_s

    @property
    def mean_cost(self) -> float:
        """Of a sequence, over the last ones that came."""
        return self._mean_cost

    def note_cost(self, cost: int, weight: int) -> None:
        """A request of so many sequences has come."""
        each = cost / weight
        self._mean_cost += (each - self._mean_cost) * (_MEAN_WEIGHT if self._mean_cost else 1.0)

    def pass_time(self, now: float, *, busy: bool) -> None:
        """Called with every change: it was until now as the last call said, from now on it is `busy` or not."""
        if self._busy and now > self._at:
            self._total_busy_s += now - self._at
            keep = math.exp((self._at - now) / MEMORY_S)
            self._work *= keep
            self._busy_s = self._busy_s * keep + MEMORY_S * (1.0 - keep)
        self._at, self._busy = now, busy

    def mark(self) -> Mark:
        """To be kept until `done`, as of the last `pass_time`."""
        return Mark(self._at, self._total_busy_s)

    def done(self, work: int, began: Mark) -> None:
        """A request left its place, as of the last `pass_time`. So much of its work counts as of its time was busy:
        many end together, and with the first of them the service is busy no more."""
        whole_s, busy_s = self._at - began.at, self._total_busy_s - began.busy_s
        if busy_s > 0:
            self._work += work * busy_s / whole_s
            self._num_done += 1


class Margin:
    """What is added to predictions so that nearly all requests wait no longer. Follows a quantile, one step each."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def learn(self, predicted_s: float, waited_s: float) -> None:
        """A request has waited; `predicted_s` is without a margin."""
        step = _STEP * (1.0 + self.seconds)
        above = waited_s > predicted_s + self.seconds
        self.seconds = max(0.0, self.seconds + step * (_QUANTILE if above else _QUANTILE - 1.0))


def work_before(tenant: str, work: Mapping[str, float], quantum: int) -> float:
    """What is done, of the work that waits by tenant, before one more request of `tenant` begins.

    Tenants take turns by `quantum`: of another's work no more goes before than of the tenant's own, and one turn.
    """
    own = work.get(tenant, 0.0)
    return own + sum(min(other, own + quantum) for name, other in work.items() if name != tenant)
