"""A simulated decode worker, with its host memory for swapped blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from common.errors import ResourceExhausted
from common.group_need import blocks_of
from common.types import WorkerLoad
from decode_svc.preemption import Preemption
from decode_svc.scheduler import DecodeScheduler, Group
from looseleaf.simulation.arena import Holder, Table
from looseleaf.simulation.worker import GIVEN_BACK, Running, Setting, Worker, in_ns


class HostMemory:
    """The host memory of a simulated decode worker for swapped blocks. Copies take virtual time, which the next step
    includes.
    """

    num_groups = 1

    def __init__(self, worker: DecodeWorker, block_bytes: int) -> None:
        self._worker = worker
        self.block_bytes = block_bytes
        self.num_blocks = min(worker.options.swap_bytes // max(1, block_bytes), worker.options.num_blocks)
        self.num_free = self.num_blocks
        self.spent_s = 0.0
        """Time of copies since the last step."""
        self._swapped: dict[Group, int] = {}

    def need(self, group: Group) -> int:
        return sum(blocks_of(s.num_computed, self._worker.options.block_size) for s in group.live)

    def has_room(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free

    def swap_out(self, group: Group) -> bool:
        num_blocks = self.need(group)
        self._worker.release(group)
        self._swapped[group] = num_blocks
        self.num_free -= num_blocks
        self._spend(num_blocks)
        return True

    def swap_in(self, group: Group, spare: int) -> int | None:
        """Copies a group's blocks back, except those that are still cached. Returns the number of copied blocks, or
        None if too few blocks are available.
        """
        worker, running = self._worker, self._worker.running[group]
        keys = [running.key(block) for block in range(running.sample.num_sealed)]
        table = Table(worker.arena.acquire(worker.holder, keys))
        missing = self._swapped[group] - len(table)
        if worker.arena.available(worker.holder) < missing + spare or not worker.arena.alloc(worker.holder, missing):
            worker.arena.release(worker.holder, table)
            return None
        table.num_own = missing
        running.table = table
        running.sample.tail_sealed = False
        running.seal(worker.arena, worker.options.block_size)
        self.drop(group)
        self._spend(missing)
        return missing

    def drop(self, group: Group) -> None:
        self.num_free += self._swapped.pop(group, 0)

    def _spend(self, num_blocks: int) -> None:
        self.spent_s += num_blocks * self.block_bytes / self._worker.costs.copy_bytes_per_s


class DecodeWorker(Worker):
    """A decode worker with the real `DecodeScheduler` and `Preemption`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        options, self._clock = self.options, asyncio.get_running_loop().time
        self.scheduler = DecodeScheduler(max_num_seqs=options.max_num_seqs, max_queue=options.max_queue)
        self.memory = HostMemory(self, self.costs.kv_bytes_per_token * options.block_size)
        self.preemption = Preemption(self.scheduler, self.memory, options.preemption, self._now)
        self.running: dict[Group, Running] = {}
        self._plan: Sequence[Group] = ()
        self._copied: set[Group] = set()
        """Groups of this step that copy a sealed partial block on write."""
        self._spoken_for = 0
        self._forward_s = 0.0

    def submit(self, running: Running, source: Holder, priority: int) -> asyncio.Future[str]:
        """Queues a group whose blocks `source` holds in this arena. Raises ResourceExhausted if the queue is full."""
        if self.scheduler.is_full():
            raise ResourceExhausted("the decode queue is full", retry_after_s=1.0)
        loop, sample = asyncio.get_running_loop(), running.sample
        self.arena.move(running.table, source, self.holder)
        sample.tail_sealed = sample.num_computed % self.options.block_size != 0
        group = Group(running.number, 0, [sample], priority, arrived_ns=in_ns(loop.time()), live=[sample])
        running.ended = loop.create_future()
        self.running[group] = running
        self.scheduler.add(group)
        self.wake()
        return running.ended

    @property
    def is_idle(self) -> bool:
        return self.scheduler.idle

    def begin_step(self) -> float | None:
        self._schedule()
        self._plan = self._reserve()
        swaps_s, self.memory.spent_s = self.memory.spent_s, 0.0
        if not self._plan:
            return swaps_s or None
        self._forward_s = self.costs.decode_s(len(self._plan), sum(g.live[0].num_computed for g in self._plan))
        return self._forward_s + swaps_s

    def end_step(self, now: float) -> None:
        if self._plan:
            self.preemption.costs.note_step(len(self._plan), self._forward_s)
        for group in self._plan:
            running, sample = self.running[group], group.live[0]
            if group in self._copied:  # the source of the copy
                self.arena.release_own(self.holder, 1)
            sample.num_computed += 1
            sample.output_ids.append(0)
            running.token_times.append(now)
            running.seal(self.arena, self.options.block_size)
            if sample.finish_reason(self.options.max_model_len) is not None:
                self._leave(group)
        self._plan, self._copied = (), set()

    def _now(self) -> float:
        """Returns the time after the copies that the next step includes."""
        return self._clock() + self.memory.spent_s

    def load(self) -> WorkerLoad:
        queues = self.scheduler.load()
        return WorkerLoad(
            num_running=queues.num_running,
            num_waiting=queues.num_waiting,
            num_preempted=queues.num_preempted,
            free_blocks=self.arena.available(self.holder),
            total_blocks=self.arena.num_blocks,
            step_fixed_s=self.preemption.costs.fixed_s,
            step_token_s=self.preemption.costs.token_s(),
        )

    def release(self, group: Group) -> None:
        self.arena.release(self.holder, self.running[group].table)

    # --- one step, as in `decode_svc.worker.DecodeWorker`

    def _schedule(self) -> None:
        while (group := self.scheduler.in_the_way()) is not None:
            self._preempt(group)
        self.preemption.resume(self._preempt, lambda: sum(map(self._needs_block, self.scheduler.running)))
        self._spoken_for = 0
        self.scheduler.admit(self._fits)

    def _fits(self, group: Group) -> bool:
        if not self.scheduler.running:
            return True
        needed = self._needs_block(group) + 1
        if self.arena.available(self.holder) - self._spoken_for < needed:
            return False
        self._spoken_for += needed
        return True

    def _needs_block(self, group: Group) -> bool:
        sample, table = group.live[0], self.running[group].table
        return sample.tail_sealed or sample.num_computed // self.options.block_size == len(table)

    def _reserve(self) -> list[Group]:
        plan: list[Group] = []
        for group in self.scheduler.running:  # the loop preempts only groups after `group`
            if self._needs_block(group) and not self._alloc(group):
                break
            plan.append(group)
        return plan

    def _alloc(self, group: Group) -> bool:
        """Allocates the block of a group's next position, and preempts later groups if necessary. Returns False if
        there is no block and no later group.
        """
        while not self.arena.alloc(self.holder, 1):
            victim = self.scheduler.victim()
            if victim is None or victim is group:
                return False
            self._preempt(victim)
        sample = group.live[0]
        if sample.tail_sealed:
            self._copied.add(group)
            sample.tail_sealed = False
        else:
            self.running[group].table.num_own += 1
        return True

    def _preempt(self, group: Group) -> None:
        self.running[group].preemptions += 1
        if self.preemption.preempt(group) is not None:
            self._leave(group, GIVEN_BACK)

    def _leave(self, group: Group, why: str = "") -> None:
        self.release(group)
        self.preemption.drop(group)
        self.scheduler.remove(group)
        self.running.pop(group).end(why)
