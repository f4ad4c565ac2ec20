"""Decides which chunks of which prompts are in the next prefill step. Prompts of one priority are served in order of
arrival, in chunks under a token budget, with several prompts per step. A prompt is admitted only if blocks are
available for its whole group. The blocks of KV groups with a window are an exception: they are allocated chunk by
chunk. No prompt is admitted while the first prompt of the queue cannot get its blocks, or while a running prompt gets
no chunk for lack of blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.errors import ResourceExhausted
from common.line_fit import LineFit
from common.types import WorkerLoad
from engine.sequence import Chunk
from prefill_svc.job import Job
from prefill_svc.step_limit import StepBudget, StepLimit


@dataclass(order=True, slots=True)
class _Waiting:
    priority: int
    number: int
    job: Job = field(compare=False)


class PrefillScheduler:
    """A scheduler with a queue of waiting prompts, and a list of running prompts in the order of their admission."""

    def __init__(
        self, *, max_num_batched_tokens: int, max_num_seqs: int, max_queue: int, limit: StepLimit | None = None
    ) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens
        self._limit = limit
        self._max_num_seqs = max_num_seqs
        self._max_queue = max_queue
        self._waiting: list[_Waiting] = []
        self._running: list[_Waiting] = []
        """The prompts that have been admitted, with their former places in the queue."""
        self._arrivals = 0
        self._steps = LineFit()
        """Duration of a step in seconds, by its number of prompt tokens."""

    def add(self, job: Job) -> None:
        """Queues a job. Raises ResourceExhausted if `max_queue` prompts are already waiting."""
        if self.num_waiting >= self._max_queue:
            raise ResourceExhausted(f"the prefill queue is full with {self._max_queue} requests", retry_after_s=1.0)
        heapq.heappush(self._waiting, _Waiting(job.priority, self._arrivals, job))
        self._arrivals += 1

    def plan(
        self, admit: Callable[[Job], bool], grow: Callable[[Chunk], bool] = lambda _: True
    ) -> list[tuple[Job, Chunk]]:
        """Returns the chunks of the next step, with chunks of running prompts first. `admit(job)` allocates the job's
        blocks, all or none, and returns whether it succeeded. `grow(chunk)` does so for blocks that are allocated chunk
        by chunk. A prompt without its blocks waits.
        """
        budget = StepBudget(self._max_num_batched_tokens, self._limit)
        plan: list[tuple[Job, Chunk]] = []
        is_short = False
        for running in self._running:
            is_short |= not self._take(running.job, budget, plan, grow)
        places = self._max_num_seqs - self._num_running
        while not budget.is_spent and places > 0 and not is_short:
            head = self._head()
            if head is None or head.width > places or not admit(head):
                break
            self._running.append(heapq.heappop(self._waiting))
            places -= head.width
            is_short = not self._take(head, budget, plan, grow)
        return plan

    def _take(self, job: Job, budget: StepBudget, plan: list[tuple[Job, Chunk]], grow: Callable[[Chunk], bool]) -> bool:
        """Adds chunks of the job's sequences to `plan`. Returns False if there is no chunk for lack of blocks.

        Sequences other than the trunk begin in the step that completes the trunk, or later. A step writes the K and V
        of a layer before it reads them, so the blocks that these sequences share with the trunk are ready.
        """
        taken = 0
        for sequence in job.sequences:
            start = sequence.num_computed
            num_tokens = min(sequence.num_tokens - start, budget.most_tokens(start))
            if num_tokens > 0:
                if not grow(chunk := Chunk(sequence, num_tokens)):
                    return taken > 0
                plan.append((job, chunk))
                budget.take(start, num_tokens)
                taken += num_tokens
        return True

    def give_way(self, *, even_alone: bool = False) -> Job | None:
        """Moves the prompt that was admitted last back to its place in the queue, so that other prompts can get its
        blocks. Returns its job, or None if no prompt is running, or if only one is running and `even_alone` is False.
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
        """Marks a job as cancelled, so that it runs no more steps. Returns whether the job was running and therefore
        holds blocks.
        """
        job.cancelled = True
        num_running = len(self._running)
        self._running = [running for running in self._running if running.job is not job]
        if len(self._running) == num_running and self.num_waiting < len(self._waiting) // 2:
            self._waiting = [waiting for waiting in self._waiting if not waiting.job.cancelled]
            heapq.heapify(self._waiting)
        return len(self._running) < num_running

    def drop_all(self) -> None:
        """Removes all jobs."""
        self._running.clear()
        self._waiting.clear()

    @property
    def num_waiting(self) -> int:
        return sum(not w.job.cancelled for w in self._waiting)

    @property
    def idle(self) -> bool:
        return not self._running and self._head() is None

    def note_step(
        self, chunks: Sequence[tuple[int, int]], pass_s: float, rest_s: float = 0.0, starts_decode: bool = False
    ) -> None:
        """Records the duration of a step's forward pass and of the rest of the step, for the rate in `load` and for the
        limit, and whether the step handed over a sequence. Each chunk is its first position and its number of tokens.
        """
        self._steps.note(sum(num_tokens for _, num_tokens in chunks), pass_s + rest_s)
        if self._limit is not None:
            self._limit.note_step(chunks, pass_s, rest_s, starts_decode)

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
