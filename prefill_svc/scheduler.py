"""Which prompts, and how much of each, go into the next prefill step. Plain Python: no torch, no I/O, no clock.

First come first served within a priority, in chunks under a token budget, several prompts a step. A prompt is admitted
only if all its blocks can be had; while the head of the queue waits for blocks nobody overtakes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import ResourceExhausted
from common.types import WorkerLoad
from engine.sequence import Chunk, Sequence


@dataclass(slots=True, eq=False)
class Job:
    """One prompt on its way through prefill."""

    sequence: Sequence
    priority: int = 0
    arrived_ns: int = 0
    started_ns: int = 0
    """When its first step began; 0 while it waits."""
    cancelled: bool = False


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    number: int
    job: Job = field(compare=False)


class PrefillScheduler:
    """Waiting prompts in order, running prompts in the order of their admission."""

    def __init__(self, *, max_num_batched_tokens: int, max_num_seqs: int, max_queue: int) -> None:
        self._budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._waiting: list[_Waiting] = []
        self._running: list[Job] = []
        self._arrivals = 0

    def add(self, job: Job) -> None:
        """Queue a job. Raises ResourceExhausted when `max_queue` prompts wait already."""
        if self.num_waiting >= self._max_queue:
            raise ResourceExhausted(f"the prefill queue holds its {self._max_queue} requests", retry_after_s=1.0)
        heapq.heappush(self._waiting, _Waiting(job.priority, self._arrivals, job))
        self._arrivals += 1

    def plan(self, admit: Callable[[Job], bool]) -> list[tuple[Job, Chunk]]:
        """The chunks of the next step, running prompts first.

        `admit(job)` gets the job's blocks, all or none, and says whether it got them.
        """
        budget = self._budget
        plan: list[tuple[Job, Chunk]] = []
        for job in self._running:
            budget -= self._take(job, budget, plan)
        while budget > 0 and len(self._running) < self._max_num_seqs:
            head = self._head()
            if head is None or not admit(head):
                break
            heapq.heappop(self._waiting)
            self._running.append(head)
            budget -= self._take(head, budget, plan)
        return plan

    def _take(self, job: Job, budget: int, plan: list[tuple[Job, Chunk]]) -> int:
        num_tokens = min(job.sequence.num_tokens - job.sequence.num_computed, budget)
        if num_tokens > 0:
            plan.append((job, Chunk(job.sequence, num_tokens)))
        return num_tokens

    def _head(self) -> Job | None:
        while self._waiting and self._waiting[0].job.cancelled:
            heapq.heappop(self._waiting)
        return self._waiting[0].job if self._waiting else None

    def remove(self, job: Job) -> bool:
        """Forget a job; True if it was running, so that it holds blocks."""
        job.cancelled = True
        if job in self._running:
            self._running.remove(job)
            return True
        return False

    def drop_all(self) -> None:
        """Forget every job."""
        self._running.clear()
        self._waiting.clear()

    @property
    def num_waiting(self) -> int:
        return sum(not w.job.cancelled for w in self._waiting)

    @property
    def idle(self) -> bool:
        return not self._running and self._head() is None

    def load(self) -> WorkerLoad:
        jobs = [*self._running, *(w.job for w in self._waiting if not w.job.cancelled)]
        waiting_tokens = sum(j.sequence.num_tokens - j.sequence.num_computed for j in jobs)
        return WorkerLoad(len(self._running), len(jobs) - len(self._running), waiting_tokens)
