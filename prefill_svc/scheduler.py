"""Decides which prompts, and how much of each, go into the next prefill step. Uses no torch, I/O or clock.

Prompts of one priority are served in order of arrival, in chunks under a token budget, with several prompts per step. A
prompt is admitted, with all branches of its group, only if blocks for all of it are available, except for those that it
will release again while it is computed: these are allocated chunk by chunk. While the first prompt of the queue or a
running prompt waits for blocks, no other prompt is admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import ResourceExhausted
from common.line_fit import LineFit
from common.types import WorkerLoad
from engine.sequence import Chunk
from prefill_svc.job import Job


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    number: int
    job: Job = field(compare=False)


class PrefillScheduler:
    """The queue of waiting prompts, and the list of running prompts in the order of their admission."""

    def __init__(self, *, max_num_batched_tokens: int, max_num_seqs: int, max_queue: int) -> None:
        self._budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._waiting: list[_Waiting] = []
        self._running: list[_Waiting] = []
        """The prompts that have been admitted, with the places that they had in the queue."""
        self._arrivals = 0
        self._steps = LineFit()
        """Seconds of a step by its number of prompt tokens."""

    def add(self, job: Job) -> None:
        """Queues a job. Raises ResourceExhausted if `max_queue` prompts are already waiting."""
        if self.num_waiting >= self._max_queue:
            raise ResourceExhausted(f"the prefill queue is full with {self._max_queue} requests", retry_after_s=1.0)
        heapq.heappush(self._waiting, _Waiting(job.priority, self._arrivals, job))
        self._arrivals += 1

    def plan(
        self, admit: Callable[[Job], bool], grow: Callable[[Chunk], bool] = lambda _: True
    ) -> list[tuple[Job, Chunk]]:
        """Returns the chunks of the next step, running prompts first.

        `admit(job)` obtains the job's blocks, all or none, and returns whether it got them. `grow(chunk)` does the same
        for the blocks that are allocated chunk by chunk. If a prompt does not get its blocks, it waits.
        """
        budget = self._budget
        plan: list[tuple[Job, Chunk]] = []
        is_short = False
        for running in self._running:
            taken = self._take(running.job, budget, plan, grow)
            is_short |= taken == 0 < budget
            budget -= taken
        places = self._max_num_seqs - self._num_running
        while budget > 0 and places > 0 and not is_short:
            head = self._head()
            if head is None or head.width > places or not admit(head):
                break
            self._running.append(heapq.heappop(self._waiting))
            places -= head.width
            taken = self._take(head, budget, plan, grow)
            is_short = taken == 0
            budget -= taken
        return plan

    def _take(self, job: Job, budget: int, plan: list[tuple[Job, Chunk]], grow: Callable[[Chunk], bool]) -> int:
        """Adds chunks of the job's sequences to `plan`, and returns how many tokens of the budget they take.

        The sequences are computed in order: the other sequences begin in the step that completes the trunk, or later. A
        step writes K and V of each layer before it reads any, so the blocks that they share with the trunk are ready.
        """
        taken = 0
        for sequence in job.sequences:
            num_tokens = min(sequence.num_tokens - sequence.num_computed, budget - taken)
            if num_tokens > 0:
                if not grow(chunk := Chunk(sequence, num_tokens)):
                    break
                plan.append((job, chunk))
                taken += num_tokens
        return taken

    def give_way(self, *, even_alone: bool = False) -> Job | None:
        """Moves the prompt that was admitted last back to its place in the queue, so that others get its blocks, and
        returns its job. If only one prompt is running, does so only if `even_alone` is set; otherwise returns None.
        """
        if len(self._running) < (1 if even_alone else 2):
            return None
        heapq.heappush(self._waiting, last := self._running.pop())
        return last.job

    def _head(self) -> Job | None:
        while self._waiting and self._waiting[0].job.cancelled:
            heapq.heappop(self._waiting)
        return self._waiting[0].job if self._waiting else None

    def remove(self, job: Job) -> bool:
        """Forgets a job. Returns True if it was running, which means that it holds blocks."""
        job.cancelled = True
        num_running = len(self._running)
        self._running = [running for running in self._running if running.job is not job]
        return len(self._running) < num_running

    def drop_all(self) -> None:
        """Forgets every job."""
        self._running.clear()
        self._waiting.clear()

    @property
    def num_waiting(self) -> int:
        return sum(not w.job.cancelled for w in self._waiting)

    @property
    def idle(self) -> bool:
        return not self._running and self._head() is None

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Records how long a step took, for the rate in `load`."""
        self._steps.note(num_tokens, seconds)

    def load(self) -> WorkerLoad:
        num_waiting = waiting_tokens = 0
        for waiting in self._waiting:
            if not waiting.job.cancelled:
                num_waiting += waiting.job.width
                waiting_tokens += waiting.job.num_uncomputed
        for running in self._running:
            waiting_tokens += running.job.num_uncomputed
        token_s = self._steps.ratio
        return WorkerLoad(
            self._num_running, num_waiting, waiting_tokens, prompt_tokens_per_s=1.0 / token_s if token_s else 0.0
        )

    @property
    def _num_running(self) -> int:
        return sum([running.job.width for running in self._running])
