"""The cores of a simulated machine, on which one or several workers run their steps."""

from __future__ import annotations

import asyncio
import itertools

from looseleaf.simulation.costs import Costs

IDLE_S = 0.05
"""Time in seconds without a step after which the machine counts as idle."""


class Cores:
    """Cores that run one step at a time. Workers that share them take turns."""

    def __init__(self, costs: Costs) -> None:
        self.turn = asyncio.Lock()
        self._starts = itertools.cycle(costs.idle_factors or (1.0,))
        self._free_since = float("-inf")

    def begin_prefill(self, now: float) -> float:
        """Returns how many times as long a prefill step takes that begins now. After a pause, this is the next of the
        measured factors (`Costs.idle_factors`).
        """
        return next(self._starts) if now - self._free_since >= IDLE_S else 1.0

    def end_step(self, now: float) -> None:
        self._free_since = now
