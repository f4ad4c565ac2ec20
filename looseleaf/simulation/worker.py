"""Defines what simulated prefill and decode workers have in common. The schedulers and the preemption are the real
ones, and measured times replace the model.

The steps are those of `prefill_svc.worker` and `decode_svc.worker`, for requests with one sample, without the reserve
of blocks for outages.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from common.types import SamplingParams, StoppingParams, WorkerLoad, WorkerRecord
from decode_svc.preemption import Choice
from engine.sequence import Sequence
from looseleaf.simulation.arena import Arena, Holder, Key, Table
from looseleaf.simulation.cores import Cores
from looseleaf.simulation.costs import Costs, Start
from looseleaf.simulation.trace import TraceRequest
from worker.loop import RETRY_ALLOC_S

Report = Callable[[str, WorkerLoad], None]
GIVEN_BACK = "given back"


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of all workers, most of which are named like the flags of `looseleaf serve`."""

    block_size: int = 16
    num_blocks: int = 8192
    max_model_len: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_itl_s: float | None = None
    """Limit on the time of a prefill and a decode step together, for workers that take turns. 0: no limit; None: the
    default.
    """
    max_queue: int = 1024
    preemption: Choice = "auto"
    swap_bytes: int = 1 << 30


@dataclass(slots=True, eq=False)
class Running:
    """A request in the simulation."""

    number: int
    request: TraceRequest
    sample: Sequence
    keys: list[Key]
    """The keys of the prompt's full blocks."""
    table: Table = field(default_factory=Table)
    token_times: list[float] = field(default_factory=list)
    queue_s: float = 0.0
    """Time in the queue of the first prefill worker."""
    num_cached: int = 0
    preemptions: int = 0
    start: Start | None = None
    """How the latest step of its prefill started, if the cores had been idle."""
    ended: asyncio.Future[str] | None = None
    """The result of the current prefill or decode when it ends: "" or `GIVEN_BACK`."""

    @classmethod
    def of(cls, number: int, request: TraceRequest, block_size: int) -> Running:
        prompt = cast("list[int]", range(request.prompt_len))  # only the length is used
        stopping = StoppingParams(max_tokens=request.output_len)
        sample = Sequence(prompt, [], SamplingParams(), stopping)
        return cls(number, request, sample, list(request.block_keys(block_size)))

    def key(self, block: int) -> Key:
        return self.keys[block] if block < len(self.keys) else ("output", self.number, block)

    def end(self, why: str = "") -> None:
        assert self.ended is not None
        if not self.ended.done():
            self.ended.set_result(why)

    def seal(self, arena: Arena, block_size: int) -> None:
        """Indexes the blocks that the last step has filled."""
        for block in range(len(self.table.keys), self.sample.num_computed // block_size):
            arena.seal(self.table, self.key(block))
        self.sample.num_sealed = len(self.table.keys)


@dataclass(frozen=True, slots=True)
class Setting:
    """The parameters with which a worker is built."""

    record: WorkerRecord
    arena: Arena
    holder: Holder
    options: WorkerOptions
    costs: Costs
    cores: Cores
    takes_turns: bool
    """Whether other workers share the cores."""
    report: Report


class Worker(ABC):
    """A simulated worker, which runs steps while it has work."""

    def __init__(self, setting: Setting) -> None:
        self.record, self.arena, self.holder = setting.record, setting.arena, setting.holder
        self.options, self.costs = setting.options, setting.costs
        self.busy_s = 0.0
        self.waited_s = 0.0
        """Time that the worker waited for its latest turn."""
        self.cores, self._report = setting.cores, setting.report
        self._work = asyncio.Event()

    async def run(self) -> None:
        """Runs steps whenever there is work, until the task is cancelled."""
        clock = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            asked_at = clock.time()
            async with self.cores.turn:
                await asyncio.sleep(self.cores.change_s(self, clock.time()))
                self.waited_s = clock.time() - asked_at
                seconds = self.begin_step()
                if seconds is not None:
                    self.busy_s += seconds
                    await asyncio.sleep(seconds)
                    self.cores.end_step(clock.time())
                    self.end_step(clock.time())
            self._report(self.record.worker_id, self.load())
            if self.is_idle:
                self._work.clear()
                self.cores.with_work.discard(self)
            elif seconds is None:
                await asyncio.sleep(RETRY_ALLOC_S)

    @property
    def others_have_work(self) -> bool:
        """Whether another worker on the same cores has work."""
        return not self.cores.with_work <= {self}

    def wake(self) -> None:
        self._work.set()
        self.cores.with_work.add(self)

    @property
    @abstractmethod
    def is_idle(self) -> bool: ...

    @abstractmethod
    def begin_step(self) -> float | None:
        """Plans a step and returns its time in seconds, or None if nothing can run."""

    @abstractmethod
    def end_step(self, now: float) -> None:
        """Applies the results of the step that has run."""

    @abstractmethod
    def load(self) -> WorkerLoad: ...


def in_ns(seconds: float) -> int:
    return round(seconds * 1e9)
