"""A simulated prefill worker."""

from __future__ import annotations

import asyncio

from common.group_need import blocks_of
from common.types import WorkerLoad
from engine.sequence import Chunk
from looseleaf.simulation.arena import Table
from looseleaf.simulation.worker import Running, Setting, Worker, in_ns
from prefill_svc.job import Job
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.step_limit import StepLimit


class PrefillWorker(Worker):
    """A prefill worker with the real `PrefillScheduler`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        options = self.options
        has_limit = setting.takes_turns and options.max_itl_s != 0
        self.scheduler = PrefillScheduler(
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_queue=options.max_queue,
            limit=StepLimit(options.max_itl_s, lambda: self.waited_s, lambda: self.others_have_work)
            if has_limit
            else None,
        )
        self._running: dict[Job, Running] = {}
        self._plan: list[tuple[Job, Chunk]] = []
        self._chunks: list[tuple[int, int]] = []
        self._seconds = 0.0

    def submit(self, running: Running, priority: int) -> asyncio.Future[str]:
        """Queues a prompt, with the outputs that it has so far. Raises ResourceExhausted if the queue is full."""
        loop = asyncio.get_running_loop()
        job = Job([running.sample], priority, arrived_ns=in_ns(loop.time()))
        self.scheduler.add(job)
        self._running[job] = running
        running.ended = loop.create_future()
        self.wake()
        return running.ended

    @property
    def is_idle(self) -> bool:
        return self.scheduler.idle

    def begin_step(self) -> float | None:
        self._plan = self.scheduler.plan(self._admit)
        if not self._plan:
            return None
        self._chunks = [(chunk.sequence.num_computed, chunk.num_tokens) for _, chunk in self._plan]
        num_tokens = sum(count for _, count in self._chunks)
        start, factor = self.cores.begin_prefill(num_tokens, asyncio.get_running_loop().time()) or (None, 1.0)
        for job, _ in self._plan:
            self._running[job].start = start
        self._seconds = factor * self.costs.prefill_s(self._chunks)
        return self._seconds

    def _admit(self, job: Job) -> bool:
        """Acquires the cached prefix, and allocates the other blocks, all or none, as `GroupBlocks.admit` does. Returns
        whether the job got its blocks.
        """
        running, sample, size = self._running[job], job.trunk, self.options.block_size
        reusable = (sample.num_tokens - 1) // size
        keys = [running.key(block) for block in range(reusable)]
        running.table = Table(self.arena.acquire(self.holder, keys))
        missing = blocks_of(sample.num_tokens, size) - len(running.table)
        if not self.arena.alloc(self.holder, missing):
            self.arena.release(self.holder, running.table)
            return False
        running.table.num_own = missing
        sample.num_sealed = len(running.table.keys)
        sample.num_computed = sample.num_cached = sample.num_sealed * size
        job.started_ns = in_ns(asyncio.get_running_loop().time())
        if not running.token_times:
            running.queue_s = (job.started_ns - job.arrived_ns) / 1e9
            running.num_cached = min(sample.num_cached, len(sample.prompt_ids))
        return True

    def end_step(self, now: float) -> None:
        starts_decode = False
        for job, chunk in self._plan:
            running = self._running[job]
            chunk.sequence.num_computed = chunk.end
            running.seal(self.arena, self.options.block_size)
            if job.is_computed:
                self.scheduler.remove(job)
                del self._running[job]
                chunk.sequence.output_ids.append(0)
                starts_decode |= chunk.sequence.finish_reason(self.options.max_model_len) is None
                running.token_times.append(now)
                running.end()
        self.scheduler.note_step(self._chunks, self._seconds, starts_decode=starts_decode)
        self._plan = []

    def load(self) -> WorkerLoad:
        return self.scheduler.load()
