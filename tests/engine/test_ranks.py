"""A model has the same bits on one, two and four ranks, and in one, two and three stages."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from block_store.arena.writer_slots import WriterSlots
from engine.config import Family
from engine.errors import ModelError, RankLost
from engine.model_runner import ModelRunner, RunnerSettings
from engine.ranks.leader import BEAT_S, SILENT_BEATS, Follower, Leader
from engine.ranks.messages import pack, unpack
from engine.sequence import Chunk, lay_out
from engine.tiny import make_checkpoint
from kernels import row_parallel
from testing.engine import Batch
from testing.ranks import PROMPTS, ThreadRanks, logits_of, shared_arena
from testing.system import wait_for

HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES: dict[Family, dict[str, Any]] = {
    "llama": {"vocab_size": 509, "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "phi3": {},
}
"""Families with different layers: biases, norms of heads, norms after sublayers, fused projections."""

pytestmark = pytest.mark.skipif(row_parallel.entry() is None, reason="no C++ kernels are built")


def settings_of(path: Path, **more: Any) -> RunnerSettings:
    return RunnerSettings(path, **({"reduction_parts": 4, "num_threads": 1} | more))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_on_one_two_and_four_ranks(family: Family, dtype: Any, tmp_path: Path) -> None:
    """With chunks of 16 tokens, some chunks compute no logits. A chunk of 300 contains whole prompts."""
    make_checkpoint(tmp_path, family, std=0.1, **HEADS, **FAMILIES[family])
    settings = settings_of(tmp_path, dtype=dtype)
    expected = logits_of(ModelRunner(settings), None, 300)
    grids = [(2, 1, False, 16), (2, 1, True, 300), (4, 1, False, 300)]
    in_stages = [(1, 2, False, 300), (1, 2, True, 16), (1, 3, False, 16), (2, 2, False, 300), (2, 2, True, 16)]
    for size, stages, eager, budget in [*grids, *in_stages]:
        more = settings_of(tmp_path, dtype=dtype, enforce_eager=eager)
        with ThreadRanks(more, size, stages) as ranks:
            for one, other in zip(expected, logits_of(ranks.runner, ranks, budget), strict=True):
                assert torch.equal(one, other)


def test_parts_change_the_bits_and_the_fingerprint(tmp_path: Path) -> None:
    """The tests above would therefore detect a different order of sums."""
    make_checkpoint(tmp_path, std=0.1, **HEADS)
    whole, parts = (ModelRunner(settings_of(tmp_path, dtype="float32", reduction_parts=each)) for each in (None, 4))
    assert not all(map(torch.equal, logits_of(whole, None, 300), logits_of(parts, None, 300)))
    assert "parts" not in whole.numerics and "parts=4" in parts.numerics.split()
    with ThreadRanks(settings_of(tmp_path, dtype="float32"), 2) as ranks:
        assert ranks.runner.numerics == parts.numerics
        assert ranks.runner.layout.fingerprint == parts.layout.fingerprint


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_blocks_that_several_ranks_fill_are_read_by_one(kv: Any, stages: int, tmp_path: Path) -> None:
    """Two or four ranks prefill the first tokens. Then the same arena is bound to one rank, and again to all."""
    make_checkpoint(tmp_path, std=0.1, **HEADS)
    alone = ModelRunner(settings_of(tmp_path, kv_cache_dtype=kv))
    expected = logits_of(alone, None, 300)
    with ThreadRanks(settings_of(tmp_path, kv_cache_dtype=kv), 2, stages) as ranks:
        batch = Batch.of(ranks.runner, PROMPTS, 5, budget=300)
        ranks.bind(arena := ranks.runner.bound_arena)
        alone.bind(arena)
        for runner in (ranks.runner, alone, ranks.runner, alone, ranks.runner):
            batch.runner = runner
            batch.step(batch._plan(batch.sequences))
    for one, rows in zip(expected, batch.logits, strict=True):
        assert torch.equal(one, torch.stack(rows))


@pytest.mark.parametrize(("size", "stages"), [(4, 1), (2, 2)])
def test_hidden_states_are_equal_too(size: int, stages: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, std=0.1, **HEADS)
    alone = ModelRunner(settings_of(tmp_path))
    step = lay_out([Chunk(Batch.of(alone, PROMPTS, 1).sequences[4], 90)], 16).batch
    expected = alone.hidden_states(step)
    with ThreadRanks(settings_of(tmp_path), size, stages) as ranks:
        ranks.bind(ranks.runner.new_arena(len(alone.bound_arena)))
        assert torch.equal(ranks.runner.hidden_states(step), expected)


def test_a_step_is_unpacked_as_it_was_packed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma2", std=0.1)
    batch = Batch.of(ModelRunner(settings_of(tmp_path)), PROMPTS, 3)
    step = lay_out([Chunk(each, min(9, each.num_tokens)) for each in batch.sequences], 16).batch
    found = unpack(bytearray(pack(step)))
    assert len(step.block_tables) > 1, "several KV groups"
    for name in ("token_ids", "positions", "cu_seqlens_q", "context_lens", "logits_rows"):
        np.testing.assert_array_equal(getattr(found, name), getattr(step, name))
    for name in ("slot_mappings", "block_tables"):
        for one, other in zip(getattr(found, name), getattr(step, name), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


@pytest.mark.parametrize(
    ("family", "config", "settings", "message"),
    [
        ("llama", {"num_key_value_heads": 1}, {}, "num_key_value_heads to be a multiple of 2, not 1"),
        ("llama", {"intermediate_size": 126}, {}, "intermediate_size to be a multiple of 4, not 126"),
        ("mixtral", {}, {}, "mixtures of experts"),
        ("opt", {}, {}, "OPT"),
        ("llama", {}, {"quantization": "int8"}, "quantization int8"),
        ("llama", {}, {"enable_lora": True}, "enable_lora"),
        ("llama", {}, {"tensor_parallel_size": 3}, "tensor_parallel_size 3 is not 1, 2, 4 or 8"),
        ("llama", {}, {"tensor_parallel_size": 4, "reduction_parts": 2}, "is more than reduction_parts 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    family: Family, config: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, **config)
    with pytest.raises(ModelError, match=message):
        ModelRunner(settings_of(tmp_path, **({"tensor_parallel_size": 2} | settings)))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    """A runner on two ranks. The second is a real process."""
    path = make_checkpoint(tmp_path_factory.mktemp("model"), std=0.1, **HEADS)
    runner = ModelRunner(settings_of(path, tensor_parallel_size=2))
    assert isinstance(runner.seat, Leader)
    yield runner
    runner.seat.close()


class Waiting(socket.socket):
    """A socket that adds up the timeouts of its receiving calls that end in one, since the last one that did not."""

    waited_s = 0.0

    def recv(self, *args: int) -> bytes:
        try:
            found = super().recv(*args)
        except TimeoutError:
            self.waited_s += cast(float, self.gettimeout())
            raise
        self.waited_s = 0.0
        return found


def test_a_frozen_rank_is_noticed_after_waits_of_less_than_five_seconds(tmp_path: Path) -> None:
    """The waits are added up, not measured, so that a pause of this process does not count."""
    settings = settings_of(make_checkpoint(tmp_path, std=0.1, **HEADS), tensor_parallel_size=2)
    ours, theirs = socket.socketpair()
    follower = Follower(1, [theirs, None], asdict(settings))
    try:
        follower.loaded()
        life = follower._life = Waiting(fileno=follower._life.detach())
        os.kill(follower.process.pid, signal.SIGSTOP)
        assert follower.watch() == f"rank 1 (process {follower.process.pid}) is frozen: no beat for 4 s"
    finally:
        follower.end()
        ours.close()
    assert life.waited_s == SILENT_BEATS * BEAT_S < 5.0


def test_a_writer_slot_is_locked_until_every_rank_has_dropped_it(together: ModelRunner, tmp_path: Path) -> None:
    """This holds while the other rank is frozen, too. A renewed role has a new slot, and the rank drops the old one."""
    leader = cast(Leader, together.seat)
    slots = WriterSlots(tmp_path / "writers")
    pid, first, second = leader.followers[0].process.pid, slots.acquire(), slots.acquire()
    leader.guard(1, first.fileno())
    os.kill(pid, signal.SIGSTOP)
    try:
        first.close()
        assert slots.is_alive(first.number)
    finally:
        os.kill(pid, signal.SIGCONT)
    leader.guard(1, second.fileno())
    second.close()
    wait_for(lambda: slots.is_alive(first.number), lambda is_alive: not is_alive, 60.0, "the old slot stays locked")
    assert slots.is_alive(second.number)


def test_ranks_end_with_the_first_and_its_steps_with_them(together: ModelRunner, tmp_path: Path) -> None:
    """The second rank ends itself when the first rank closes the connection for heartbeats, as if it had died. Until
    then, logits are those of one rank.
    """
    alone = ModelRunner(replace(together.settings, tensor_parallel_size=1))
    step = lay_out([Chunk(Batch.of(alone, PROMPTS, 1).sequences[4], 90)], 16).batch
    expected = alone.step(step)
    shared_arena(together, tmp_path / "arena", len(alone.bound_arena))
    assert torch.equal(together.step(step), expected)
    leader = cast(Leader, together.seat)
    [follower] = leader.followers
    leader._is_closed = True  # so that it does not kill the other rank
    follower._life.shutdown(socket.SHUT_RDWR)
    with pytest.raises(RankLost) as lost:
        while True:
            together.step(step)
    assert follower.process.wait() == 1
    with pytest.raises(RankLost):
        together.settle(lost.value)
