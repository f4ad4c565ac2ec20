"""Fixtures: a prefill worker with a real arena and ledger, and a holder that claims its tickets."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from block_store.arena.arena import Arena
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.rebuild import open_ledger
from block_store.ledger.scripts import LedgerScripts
from block_store.redis import redis_server
from common.ticket import Ticket
from common.types import BlockRef, Branch, SamplingParams, StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from prefill_svc.events import Done, Event
from prefill_svc.job import Job
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.worker import PrefillWorker
from testing.ledger.store import patient
from testing.oracle import Oracle


@dataclass
class World:
    """A prefill worker, and a claimer of its tickets."""

    runner: ModelRunner
    arena: Arena
    ledger: LedgerScripts
    held: HeldBlocks
    claimer: HeldBlocks
    worker: PrefillWorker
    num_computed: int = 0
    """The number of positions that the model has computed."""

    def submit(
        self,
        prompt: list[int],
        branches: list[Branch],
        sampling: SamplingParams,
        stopping: StoppingParams,
    ) -> list[Event]:
        events: list[Event] = []
        self.worker.submit(Job.of(prompt, branches, sampling, stopping), b"", events.append)
        return events

    def run(self, *many: list[Event]) -> None:
        """Runs steps until each of these jobs has its last event."""
        for _ in range(200):
            if all(events and isinstance(events[-1], Done | Exception) for events in many):
                return
            self.worker.step()
        raise AssertionError("the worker does not finish")

    def prefill(self, *args: Any) -> Done:
        events = self.submit(*args)
        self.run(events)
        done = events[-1]
        assert isinstance(done, Done), done
        return done

    def claim(self, ticket: Ticket) -> list[BlockRef]:
        """Claims the ticket. Returns the blocks that the claimer has received, according to the ledger."""
        before = set(self.claimer.holder.holdings())
        self.claimer.claim(ticket)
        return [ref for ref in self.claimer.holder.holdings() if ref not in before]


@pytest.fixture(scope="module")
def redis() -> Iterator[redis_server.RedisHandle]:
    with tempfile.TemporaryDirectory(prefix="ll-redis-") as directory:
        server = redis_server.connect(None, directory)
        patient(server.client)
        yield server
        server.close()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "llama", dtype=torch.bfloat16)
    return ModelRunner(RunnerSettings(directory, num_threads=1, max_model_len=256, device="cpu"))


@pytest.fixture(scope="module")
def oracle(runner: ModelRunner) -> Oracle:
    return Oracle(runner)


@pytest.fixture
def make_world(
    runner: ModelRunner, redis: redis_server.RedisHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., World]]:
    """Returns make_world(num_blocks=64, budget=512, max_num_seqs=16), which a test may call once. At the end of the
    test, no block may be held.
    """
    made: list[World] = []

    def make(num_blocks: int = 64, budget: int = 512, max_num_seqs: int = 16) -> World:
        arena = Arena.create(tmp_path, runner.layout, num_blocks)
        ledger = open_ledger(redis.client, arena)
        held: list[HeldBlocks] = []
        for name in ("prefill", "claimer"):
            slot = arena.acquire_writer_slot()
            held.append(
                HeldBlocks(LedgerClient.register(ledger, name, writer_slot=slot.number, floor=0), arena, slot, 0)
            )
        attached: Any = SimpleNamespace(arena=arena, held=held[0], is_fenced=False)
        runner.bind(arena.data)
        scheduler = PrefillScheduler(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_queue=16)
        world = World(runner, arena, ledger, *held, PrefillWorker(runner, attached, scheduler, b"domain"))
        step = runner.step

        def counted(batch: Any) -> torch.Tensor:
            if runner.bound_arena.data_ptr() == arena.data.ctypes.data:  # not in the oracle's arena
                world.num_computed += len(batch.token_ids)
            return step(batch)

        monkeypatch.setattr(runner, "step", counted)
        made.append(world)
        return world

    yield make
    for world in made:
        world.held.assert_idle()
        world.held.close()
        world.claimer.close()
        world.ledger.forget()
        world.arena.remove()
