"""Draws from the measurements of a cost file (`Costs.warm`, `idle`, `beside` and `late_s`), each in turn."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from looseleaf.simulation.costs import Costs, Start

Kind = Literal["warm", "idle", "beside"]
IDLE_S = 0.075
"""Time in seconds without work after which a machine counts as idle."""


class Draws:
    """Sequences of measurements, which repeat. Without measurements, the medians of the costs take their place."""

    def __init__(self, costs: Costs) -> None:
        usual = Start(0, 0.0, costs.front_s, costs.hand_over_s)
        self._starts = {
            "warm": _by_length(costs.warm or (usual,)),
            "idle": _by_length(costs.idle or (usual,)),
            "beside": _by_length(costs.beside or costs.warm or (usual,)),
        }
        self._late_s = itertools.cycle(costs.late_s or (0.0,))

    def start(self, kind: Kind, num_tokens: int) -> Start:
        """Returns the next start of a kind whose prompt has about `num_tokens` tokens."""
        starts = self._starts[kind]
        return next(starts[min(starts, key=lambda length: abs(length - num_tokens))])

    def delivered(self, times: Sequence[float]) -> tuple[float, ...]:
        """Returns when tokens reach the client, given the times of their steps. The times of the first two contain this
        already.
        """
        found = list(times[:2])
        for at_s in times[2:]:
            found.append(max(found[-1], at_s + next(self._late_s)))
        return tuple(found)


class Presence:
    """The requests that are in progress, which tell how another one starts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num = 0
        self._left_at = -math.inf

    @contextmanager
    def enter(self) -> Iterator[Kind]:
        """Counts a request until the end of the block. The value is the kind of its start."""
        pause_s = self._clock() - self._left_at
        kind: Kind = "beside" if self._num else "idle" if pause_s >= IDLE_S else "warm"
        self._num += 1
        try:
            yield kind
        finally:
            self._num -= 1
            self._left_at = self._clock()


def _by_length(starts: Sequence[Start]) -> dict[int, Iterator[Start]]:
    groups: dict[int, list[Start]] = defaultdict(list)
    for start in starts:
        groups[start.num_tokens].append(start)
    return {length: itertools.cycle(group) for length, group in groups.items()}
