"""The cores of a simulated machine, on which one or several workers run their steps."""

from __future__ import annotations

import asyncio

from looseleaf.simulation.costs import Costs, Start
from looseleaf.simulation.draws import IDLE_S, Draws


class Cores:
    """Cores that run one step at a time. Workers that share them take turns."""

    def __init__(self, costs: Costs) -> None:
        self.turn = asyncio.Lock()
        self._costs, self._draws = costs, Draws(costs)
        self._free_since = float("-inf")
        self._latest: object = None
        """The worker that has stepped last."""
        self.with_work: set[object] = set()
        """The workers that have work."""

    def begin_prefill(self, num_tokens: int, now: float) -> tuple[Start, float] | None:
        """Returns the measured start of a prefill step that begins after a pause, and how many times as long the step
        takes as without a pause. Returns None if there was no pause.
        """
        if now - self._free_since < IDLE_S or not self._costs.idle:
            return None
        start = self._draws.start("idle", num_tokens)
        return start, start.prefill_s / self._costs.prefill_s([(0, start.num_tokens)])

    def change_s(self, worker: object, now: float) -> float:
        """Returns the time that passes before `worker` steps, if another worker has just ended a step."""
        changes = self._latest not in (None, worker) and now - self._free_since < IDLE_S
        self._latest = worker
        return self._costs.turn_s if changes else 0.0

    def end_step(self, now: float) -> None:
        self._free_since = now
