"""Steps that fail midway, in both kinds of worker with a real arena and ledger. All launched work has ended before
blocks are released. If the device is unusable, the step thread ends and keeps its blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from block_store.arena.arena import Arena
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.rebuild import open_ledger
from block_store.redis import redis_server
from common.errors import Internal
from common.ticket import Ticket
from common.types import BlockRef, SamplingParams, StoppingParams
from decode_svc.outputs import AnyOutput, Rejection, Session
from decode_svc.scheduler import DecodeScheduler, Group
from decode_svc.worker import DecodeWorker
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Sequence
from engine.tiny import make_checkpoint
from prefill_svc.events import Done, Event
from prefill_svc.job import Job
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.worker import PrefillWorker
from testing.ledger.store import patient

PROMPT = list(range(5, 25))
GREEDY, STOPPING = SamplingParams(temperature=0.0), StoppingParams(max_tokens=8)
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory")
CUDA_ERROR = torch.AcceleratorError("an illegal memory access was encountered")


@dataclass
class Pair:
    """A prefill and a decode worker on one arena, with a record of the order of device waits and block releases."""

    runner: ModelRunner
    arena: Arena
    prefill: PrefillWorker
    decode: DecodeWorker
    order: list[str] = field(default_factory=list)

    def submit(self) -> list[Event]:
        events: list[Event] = []
        self.prefill.submit(Job([Sequence(PROMPT, [], GREEDY, STOPPING)]), b"", events.append)
        return events

    def hand_over(self) -> tuple[Ticket, list[AnyOutput]]:
        """Hands over a group, which decode claims. Its first step will copy the partial block."""
        events = self.submit()
        self.prefill.step()
        done = events[-1]
        assert isinstance(done, Done) and done.ticket is not None
        outputs: list[AnyOutput] = []
        group = Group(7, 0, [Sequence(PROMPT, [done.tokens[0].token_id], GREEDY, STOPPING)])
        self.decode.submit(Session(lambda found, _: outputs.extend(found)), group, done.ticket, b"")
        self.order.clear()
        return done.ticket, outputs

    def fail_with(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes the attention of the next step raise after earlier kernels of the layer were launched."""

        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(self.runner.attention, "decode", fail)
        monkeypatch.setattr(self.runner.attention, "prefill", fail)

    def watch(self, owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: self.order.append(name) or call(*args))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "llama")
    # Runs kernel by kernel, so that it can fail between two of them.
    return ModelRunner(RunnerSettings(directory, num_threads=1, max_model_len=64, device="cpu", enforce_eager=True))


@pytest.fixture
def pair(runner: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with tempfile.TemporaryDirectory(prefix="ll-redis-") as directory:
        redis = redis_server.connect(None, directory)
        arena = Arena.create(tmp_path, runner.layout, 8)
        ledger = open_ledger(patient(redis.client), arena)
        held: list[HeldBlocks] = []
        for name in ("prefill", "decode"):
            slot = arena.acquire_writer_slot()
            held.append(
                HeldBlocks(LedgerClient.register(ledger, name, writer_slot=slot.number, floor=0), arena, slot, 0)
            )
        attached: list[Any] = [SimpleNamespace(arena=arena, held=h, is_fenced=False, floor_blocks=8) for h in held]
        runner.bind(arena.data)
        by_prefill = PrefillScheduler(max_num_batched_tokens=64, max_num_seqs=4, max_queue=4)
        by_decode = DecodeScheduler(max_num_seqs=4, max_queue=4)
        made = Pair(
            runner, arena,
            PrefillWorker(runner, attached[0], by_prefill, b"domain"),
            DecodeWorker(runner, attached[1], by_decode, b"domain"),
        )  # fmt: skip
        made.watch(runner.device, "wait", monkeypatch)
        for one in held:
            made.watch(one, "release_many", monkeypatch)
        yield made
        for one in held:
            one.close()
        arena.remove()
        redis.close()


def test_a_failed_step_waits_for_what_it_launched_before_it_releases(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, outputs = pair.hand_over()
    pair.fail_with(NO_MEMORY, monkeypatch)
    pair.decode.step()
    assert [o.rejection for o in outputs] == [Rejection.INTERNAL] and pair.order == ["wait", "release_many"]
    pair.order.clear()
    events = pair.submit()
    pair.prefill.step()
    assert isinstance(events[-1], Internal) and pair.order == ["wait", "release_many"]


def test_a_cuda_error_ends_the_thread_and_keeps_the_blocks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    _, outputs = pair.hand_over()
    events = pair.submit()
    pair.fail_with(CUDA_ERROR, monkeypatch)
    for step in (pair.decode.step, pair.prefill.step):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            step()
    assert not outputs and not events and "release_many" not in pair.order


def test_a_device_that_cannot_be_waited_for_ends_the_thread(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the step need not mention the device; for example, Triton's launcher does not."""
    _, outputs = pair.hand_over()
    pair.fail_with(RuntimeError("Triton Error [CUDA]: unspecified launch failure"), monkeypatch)

    def dead() -> None:
        raise CUDA_ERROR

    monkeypatch.setattr(pair.runner.device, "wait", dead)
    with pytest.raises(torch.AcceleratorError):
        pair.decode.step()
    assert not outputs and "release_many" not in pair.order


def test_a_stale_block_is_noticed_before_a_copy_is_launched(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, outputs = pair.hand_over()
    source: BlockRef = ticket.tables[0][0][-1]
    copied: list[Any] = []
    monkeypatch.setattr(pair.runner, "copy_blocks", lambda *ids: copied.append(ids))
    pair.arena.generations[source.block] += 1  # the block is reallocated
    pair.decode.step()
    assert [o.rejection for o in outputs] == [Rejection.LOST] and not copied
