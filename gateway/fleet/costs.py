"""Predicts the times that routing compares: the times to compute a prompt, to copy its blocks to another arena, and to
wait for decode. This module does no I/O; callers pass the current time.

Prefill workers report their rates. This gateway measures copies and decode times on its own requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from common.line_fit import LineFit
from common.types import WorkerLoad
from gateway.fleet.sharing import NOT_MEASURED, StepTime

USUAL_PROMPT_TOKENS_PER_S = 2_000.0
"""Assumed rate of a prefill worker, until a worker has reported its rate."""
USUAL_COPY_START_S = 0.01
USUAL_COPY_TOKEN_S = 1e-4
"""Assumed time in seconds to copy a token's KV, until a copy between the two arenas has been measured. It is about the
time for 128 KiB at 10 Gbit/s.
"""
USUAL_DECODE_S, USUAL_DECODE_STEPS = 5.0, 100.0
"""Assumed time in seconds and number of steps for which a group decodes, until this gateway has seen a group end."""
MEMORY_S = 300.0
"""Time constant, in seconds, with which measured copies lose weight, so that a link that was slow once is tried again.
"""
_USUAL_TOKENS = 1_000
"""Length, in tokens, of the longer of the two assumed copies that are fitted together with the measured ones."""
_SLOWER_IN_FULL_BATCH = 0.5
"""The time that a full batch adds to a group's decoding, as a fraction of the time that the group takes alone."""
_DECODE_STEP = 0.05
"""Weight of one group in the moving mean of decode times, once there have been 1 / weight groups."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The means of what workers report."""

    prompt_tokens_per_s: float = USUAL_PROMPT_TOKENS_PER_S
    """The predictions for all prefill workers use this mean, because a worker that was slow once would otherwise get no
    prompts, and its rate would never change.
    """
    step: StepTime = NOT_MEASURED
    """The mean decode step. A worker counts by how recent its steps are."""

    @classmethod
    def of(cls, workers: Iterable[tuple[WorkerLoad, float]]) -> Speeds:
        """Returns the means over the workers that have measured their speed. Each worker's load comes with the weight
        of its decode steps, which is positive.
        """
        rate = fixed_s = token_s = weights = 0.0
        num_rates = 0
        for load, weight in workers:  # for every request, over all workers
            if load.prompt_tokens_per_s:
                rate, num_rates = rate + load.prompt_tokens_per_s, num_rates + 1
            if load.step_fixed_s or load.step_token_s:
                fixed_s, token_s = fixed_s + weight * load.step_fixed_s, token_s + weight * load.step_token_s
                weights += weight
        rate = rate / num_rates if num_rates else USUAL_PROMPT_TOKENS_PER_S
        return cls(rate, StepTime(fixed_s / weights, token_s / weights)) if weights else cls(rate)

    def step_of(self, load: WorkerLoad, weight: float) -> StepTime:
        """Returns the time of a worker's decode steps: `weight` parts of what it has measured, and the rest of the mean
        of all workers. It is the mean if the worker has not measured any.
        """
        if not (load.step_fixed_s or load.step_token_s):
            return self.step
        mean = self.step
        return StepTime(
            mean.fixed_s + weight * (load.step_fixed_s - mean.fixed_s),
            mean.sequence_s + weight * (load.step_token_s - mean.sequence_s),
        )


class _CopyTime:
    """A prediction of the time to copy tokens from one arena to another."""

    def __init__(self) -> None:
        self._fit = LineFit([(tokens, _usual_copy_s(tokens)) for tokens in (0, _USUAL_TOKENS)])
        self._at = -math.inf

    def note(self, num_tokens: int, seconds: float, now: float) -> None:
        self._forget(now)
        self._fit.note(num_tokens, seconds)

    def seconds(self, num_tokens: int, now: float) -> float:
        self._forget(now)
        return self._fit.at(num_tokens)

    def _forget(self, now: float) -> None:
        self._fit.fade(math.exp((self._at - now) / MEMORY_S))
        self._at = now


class RouteCosts:
    """A predictor of times in seconds. It records the measurements on which its predictions are based."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], _CopyTime] = {}
        """Copy times by source arena and destination arena."""
        self.group_s = USUAL_DECODE_S
        """Mean time for which a group has its place at a decode worker."""
        self.group_steps = USUAL_DECODE_STEPS
        """Mean number of steps in which a group decodes."""
        self._num_groups = 0

    def note_copy(self, source: str, destination: str, num_tokens: int, seconds: float, now: float) -> None:
        """Records a copy between two arenas."""
        self._copies.setdefault((source, destination), _CopyTime()).note(num_tokens, seconds, now)

    def note_decode(self, seconds: float, num_steps: int) -> None:
        """Records for how many seconds a group had its place at a decode worker, including the copy of its blocks, and
        in how many steps it decoded.
        """
        self._num_groups += 1
        weight = max(_DECODE_STEP, 1.0 / self._num_groups)
        self.group_s += weight * (seconds - self.group_s)
        self.group_steps += weight * (num_steps - self.group_steps)

    def keep(self, arena_ids: Iterable[str]) -> None:
        """Forgets the copies from or to any arena that is not in `arena_ids`."""
        live = set(arena_ids)
        self._copies = {pair: copy for pair, copy in self._copies.items() if live.issuperset(pair)}

    def copy_s(self, source: str, destination: str, num_tokens: int, now: float) -> float:
        """Returns the seconds to copy the KV of `num_tokens` tokens, or 0.0 within an arena."""
        if source == destination:
            return 0.0
        measured = self._copies.get((source, destination))
        return _usual_copy_s(num_tokens) if measured is None else measured.seconds(num_tokens, now)

    def worthwhile_tokens(self, source: str, destination: str, now: float) -> int:
        """Returns the number of tokens, at least 1, whose KV takes as long to copy as the part of a copy's time that
        does not depend on the number of tokens. With fewer tokens at a time, most of the time would be this part.
        """
        start_s = self.copy_s(source, destination, 0, now)
        token_s = (self.copy_s(source, destination, _USUAL_TOKENS, now) - start_s) / _USUAL_TOKENS
        return max(1, math.ceil(start_s / token_s)) if token_s > 0.0 else 1

    def decode_s(self, share: float, step_s: float) -> float:
        """Returns the seconds that a group takes at a decode worker, which include the wait for a place. `share` is the
        fraction of the batch that is occupied; above 1.0, sequences are waiting. `step_s` is the duration of a step
        with the group, or 0.0 if it is not known.
        """
        alone_s = self.group_s * (1.0 + _SLOWER_IN_FULL_BATCH * min(1.0, share))
        return self.group_s * max(0.0, share - 1.0) + (self.group_steps * step_s if step_s else alone_s)


def _usual_copy_s(num_tokens: int) -> float:
    return USUAL_COPY_START_S + num_tokens * USUAL_COPY_TOKEN_S
