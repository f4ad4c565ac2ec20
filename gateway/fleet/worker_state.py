"""The record that the router keeps of one worker, and the form of its choices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.types import WorkerLoad, WorkerRecord

REPORT_S = 3.0
"""Load reports older than this are ignored."""
LEAST_WEIGHT = 1e-6
"""The weight of steps that were measured long ago."""


@dataclass(slots=True)
class RecentPrompts:
    """The rate, in tokens per second, of prompts which this gateway has sent to a worker lately. A prompt of n tokens
    that was sent t seconds ago counts n / memory_s * exp(-t / memory_s).
    """

    _tokens_per_s: float = 0.0
    _at: float = 0.0

    def tokens_per_s(self, now: float, memory_s: float) -> float:
        return self._tokens_per_s * math.exp((self._at - now) / memory_s)

    def add(self, num_tokens: int, now: float, memory_s: float) -> None:
        self._tokens_per_s, self._at = self.tokens_per_s(now, memory_s) + num_tokens / memory_s, now


@dataclass(slots=True)
class WorkerState:
    """The router's record of one worker."""

    record: WorkerRecord
    load: WorkerLoad = field(default_factory=WorkerLoad)
    load_at: float = float("-inf")
    reported_at: float = float("-inf")
    """When the worker last reported its load to this gateway. The load may also come from the registry."""
    stepped_at: float = float("-inf")
    """When the worker last ran steps, as far as this gateway knows."""
    dispatched_tokens: int = 0
    """Number of tokens in this gateway's current prefill calls to the worker: prompts, and outputs of earlier attempts.
    """
    recent: RecentPrompts = field(default_factory=RecentPrompts)
    """The prompts of this gateway that the worker has or had, if it is a prefill worker."""
    dispatched_sequences: int = 0
    """Number of sequences that this gateway has sent and that have not ended."""
    suspect_until: float = float("-inf")
    unreachable_until: float = float("-inf")
    picked: int = 0

    def note_load(self, load: WorkerLoad, now: float, has_stepped: bool) -> None:
        self.load, self.load_at = load, now
        if has_stepped:
            self.stepped_at = now

    def step_weight(self, now: float, memory_s: float) -> float:
        """Returns how much the steps that the worker has measured count, from 1.0 for those of now to LEAST_WEIGHT. A
        worker whose steps were slow once would otherwise get no sequences, and its measurement would never change.
        """
        return max(LEAST_WEIGHT, math.exp((self.stepped_at - now) / memory_s))

    def tokens_before(self, now: float) -> int:
        reported = self.load.waiting_tokens if now - self.load_at < REPORT_S else 0
        return max(self.dispatched_tokens, reported)

    def sequences(self, now: float) -> int:
        load = self.load if now - self.load_at < REPORT_S else WorkerLoad()
        return max(self.dispatched_sequences, load.num_running + load.num_waiting + load.num_preempted)

    def share(self, now: float) -> float:
        """Returns the number of sequences at a decode worker as a fraction of the worker's largest batch."""
        return self.sequences(now) / max(1, self.record.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Considered:
    """A worker that was compared with others, with the prediction by which it was ranked."""

    worker_id: str
    predicted_s: float
    """The predicted time until the request ends: from the choice of the prefill worker, or of the decode worker."""
    missing_tokens: int
    """Number of prompt tokens, at least 1, that are not cached in the worker's arena."""
    delay_s: float = 0.0
    """The predicted time that sequences lose while they decode on the route, summed over them. The request's own are
    included.
    """
    itl_s: float = 0.0
    """The predicted mean time between two tokens of a sequence that decodes in the worker's process meanwhile."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The worker that was picked, and the best of the workers that were considered, best first."""

    worker: WorkerState
    considered: tuple[Considered, ...]

    @property
    def record(self) -> WorkerRecord:
        return self.worker.record
