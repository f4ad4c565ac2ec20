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
    """Time that running sequences lose, summed over the sequences."""
    itl_s: float = 0.0
    """Mean time between two tokens of a sequence that decodes in the worker's process meanwhile, or 0.0 if there is
    none.
    """
    ttft_s: float = 0.0
    """Time until the first token, or 0.0 if the first token exists already."""

    @property
    def cost_s(self) -> float:
        return self.own_s + STALL_WEIGHT * self.delay_s

    def excess(self, targets: Targets) -> float:
        """Returns by which fraction of its target the worse of TTFT and ITL is too long, or 0.0 if both are kept."""
        return max(0.0, self.ttft_s / targets.ttft_s - 1.0, self.itl_s / targets.itl_s - 1.0)


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
    def num_steps(self) -> int:
        return math.ceil(self.num_tokens / (self.chunk_tokens or max(1, self.num_tokens)))


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences at the decode worker of a process."""

    num_running: int = 0
    step_s: float = 0.0
    """Time of a step, or 0.0 if it has not been measured."""
    decode_s: float = math.inf
    """Mean time for which a sequence decodes."""

    def itl_s(self, prompts: Prompts) -> float:
        """Returns the mean time between two tokens of a sequence, for which prompts take a share of the time: those
        that wait, or those of the recent past if they take longer.
        """
        share = max(prompts.seconds, prompts.recent_s) / self.decode_s
        return self.step_s / (1.0 - min(share, MOST_SHARE))


def prefill(prompts: Prompts, missing_s: float, batch: Batch) -> Prediction:
    """Predicts the last of `prompts`, which takes `missing_s` seconds to compute, in a process that decodes `batch`."""
    if not batch.num_running:
        return Prediction(prompts.seconds, ttft_s=prompts.seconds)
    ttft_s = prompts.seconds + prompts.num_steps * batch.step_s
    return Prediction(ttft_s, batch.num_running * missing_s, batch.itl_s(prompts), ttft_s)


def decode(alone_s: float, batch: Batch, prompts: Prompts) -> Prediction:
    """Predicts a sequence that decodes with `batch` in a process that computes `prompts`. `alone_s` is the time that
    the sequence loses if there are no prompts.
    """
    return Prediction(alone_s + prompts.seconds, itl_s=batch.itl_s(prompts))
