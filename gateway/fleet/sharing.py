"""Predicts how prompts and running sequences delay each other in a process with both roles.

The roles of such a process take turns: while a prompt is computed, a decode step follows each chunk. The prompt
therefore waits for decode steps, and each running sequence waits for chunks. A worker that is alone in its process
neither causes nor suffers such a delay. This module does no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STALL_WEIGHT = 2.0
"""The cost of a second for which a running sequence waits, relative to a second of a request's own route. With 1, the
mean latency of requests would count; more protects the running sequences (docs/log, 2026-11-27).
"""
MOST_SHARE = 0.95
"""Largest share of a process's time that prompts are predicted to take."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The limits that routes should keep, in seconds."""

    ttft_s: float = math.inf
    itl_s: float = math.inf
    """Limit on the mean time between two tokens of a sequence."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted effects of sending a request to a worker, in seconds."""

    own_s: float
    """Time that the request takes or loses on this part of its route."""
    delay_s: float = 0.0
    """Time that running sequences lose, the request's own included, summed over the sequences."""
    itl_s: float = 0.0
    """Mean time between two tokens of a sequence that decodes in the worker's process meanwhile, or 0.0 if there is
    none.
    """
    ttft_s: float = 0.0
    """Time until the first token, or 0.0 if the first token exists already."""

    @property
    def cost_s(self) -> float:
        return self.own_s + STALL_WEIGHT * self.delay_s

    def then(self, rest: Prediction) -> Prediction:
        """Returns the prediction with that of the rest of the route added. ITL and TTFT are those of this part."""
        return Prediction(self.own_s + rest.own_s, self.delay_s + rest.delay_s, self.itl_s, self.ttft_s)

    def keeps(self, targets: Targets) -> bool:
        """Returns whether both TTFT and ITL are within their targets."""
        return self.ttft_s <= targets.ttft_s and self.itl_s <= targets.itl_s


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts at the prefill worker of a process."""

    num_tokens: int = 0
    """Number of tokens that are not computed yet."""
    tokens_per_s: float = 1.0
    chunk_tokens: int = 0
    """The most tokens of a step, or 0 if it is unknown."""
    recent_s: float = 0.0
    """Time to compute the prompts that arrived while a mean sequence decoded, including those that wait."""

    @property
    def seconds(self) -> float:
        return self.num_tokens / self.tokens_per_s

    @property
    def stall_s(self) -> float:
        """Time that a sequence that decodes in the process is expected to wait for prompts."""
        return max(self.seconds, self.recent_s)

    @property
    def num_steps(self) -> int:
        return math.ceil(self.num_tokens / (self.chunk_tokens or max(1, self.num_tokens)))


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a decode step, as a line by the number of sequences."""

    fixed_s: float
    """The part that does not depend on the number of sequences."""
    sequence_s: float
    """The time that each sequence adds."""


NOT_MEASURED = StepTime(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences at the decode worker of a process."""

    num_running: int = 0
    step: StepTime = NOT_MEASURED
    decode_s: float = math.inf
    """Mean time for which a sequence decodes."""
    num_steps: float = 0.0
    """Mean number of steps in which a sequence decodes."""

    def step_s(self, more: int = 0) -> float:
        """Returns the time of a step with `more` more sequences, or 0.0 if no step has been measured."""
        return self.step.fixed_s + (self.num_running + more) * self.step.sequence_s

    def itl_s(self, prompts: Prompts, more: int = 0) -> float:
        """Returns the mean time between two tokens of a sequence, for which prompts take a share of the time: those
        that wait, or those of the recent past if they take longer. There are `more` more sequences than now.
        """
        share = prompts.stall_s / self.decode_s
        return self.step_s(more) / (1.0 - min(share, MOST_SHARE))


def prefill(prompts: Prompts, missing_s: float, batch: Batch) -> Prediction:
    """Predicts the last of `prompts`, which takes `missing_s` seconds to compute, in a process that decodes `batch`."""
    if not batch.num_running:
        return Prediction(prompts.seconds, ttft_s=prompts.seconds)
    ttft_s = prompts.seconds + prompts.num_steps * batch.step_s()
    return Prediction(ttft_s, batch.num_running * missing_s, batch.itl_s(prompts), ttft_s)


def decode(alone_s: float, batch: Batch, prompts: Prompts) -> Prediction:
    """Predicts one more sequence that decodes with `batch` in a process that computes `prompts`. `alone_s` is the time
    that the sequence takes there if there are no prompts. The other sequences are expected to have half of their steps
    still to go, which become longer.
    """
    slower_s = batch.num_running * batch.step.sequence_s * batch.num_steps / 2
    return Prediction(alone_s, prompts.stall_s + slower_s, batch.itl_s(prompts, 1))
