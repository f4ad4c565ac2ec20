"""Promise 1 in the engine: a token's logits have the same bits alone, in a batch, in chunks, and after a
cached prefix.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.types import SamplingParams, StoppingParams
from engine.block_table import BlockTable
from engine.config import Family
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Chunk, Sequence, lay_out
from engine.tiny import make_checkpoint
from testing.engine import Batch, poisoned_arena
from testing.oracle import Oracle

FAMILIES: list[Family] = ["llama", "mistral", "qwen2", "qwen3", "opt"]
DTYPES = ["bfloat16", "float32"]


def runner_of(
    tmp_path: Path,
    family: Family,
    dtype: str = "bfloat16",
    *,
    num_threads: int = 1,
    std: float = 0.1,
    **overrides: object,
) -> ModelRunner:
    make_checkpoint(tmp_path, family, seed=11, std=std, **overrides)
    settings = RunnerSettings(tmp_path, dtype=dtype, num_threads=num_threads, deterministic=True)  # type: ignore[arg-type]
    return ModelRunner(settings)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(5, 512, length).tolist()


def bits(batch: Batch) -> list[torch.Tensor]:
    batch.run()
    return [torch.stack(rows) for rows in batch.logits]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_alone_batched_and_chunked_are_the_same_bits(family: Family, dtype: str, tmp_path: Path) -> None:
    runner = runner_of(tmp_path, family, dtype)
    prompts = [prompt(n) for n in (1, 15, 16, 17, 300)]
    alone = [bits(Batch.of(runner, [p], 20, budget=4096))[0] for p in prompts]
    for budget, seed in ((64, 1), (7, 2), (4096, 3)):
        together = bits(Batch.of(runner, prompts, 20, budget=budget, seed=seed))
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one, other)


def test_one_thread_gives_the_bits_of_two(tmp_path: Path) -> None:
    """This test is only for CPUs, because threads only launch kernels on a GPU."""
    make_checkpoint(tmp_path, "llama", seed=11, std=0.1)
    two = ModelRunner(RunnerSettings(tmp_path, num_threads=2, device="cpu"))
    assert torch.get_num_threads() == 2
    expected = bits(Batch.of(two, [prompt(300), prompt(5)], 10))
    one = ModelRunner(RunnerSettings(tmp_path, num_threads=1, device="cpu"))
    got = bits(Batch.of(one, [prompt(300), prompt(5)], 10))
    assert torch.get_num_threads() == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_prefix_gives_the_bits_of_a_cold_one(family: Family, tmp_path: Path) -> None:
    """A second sequence uses the full blocks of the first one, and computes only the rest."""
    runner, ids = runner_of(tmp_path, family), prompt(100)
    cold = bits(Batch.of(runner, [ids], 20))[0]
    batch = Batch.of(runner, [ids, ids], 20)
    first, second = batch.sequences
    while first.num_computed < 96:
        batch.step([Chunk(first, 16)])
    second.table = BlockTable([*first.table[:5], *second.table[5:]])
    second.num_computed = 80
    batch.run()
    assert second.num_computed > 100
    for rows in batch.logits:
        assert torch.equal(torch.stack(rows), cold)


def test_a_step_on_another_thread_gives_the_same_bits(tmp_path: Path) -> None:
    import threading

    runner = runner_of(tmp_path, "llama")
    expected = bits(Batch.of(runner, [prompt(40)], 5))[0]
    got: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: got.extend(bits(Batch.of(runner, [prompt(40)], 5))))
    thread.start()
    thread.join()
    assert torch.equal(got[0], expected)


def next_logits(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    return runner.step(lay_out([Chunk(batch.sequences[0], 1)], 16).batch).clone()  # valid until the next step


@pytest.mark.parametrize(("family", "window"), [*((f, None) for f in FAMILIES), ("mistral", 64)])
def test_every_visible_block_is_read_and_no_other(family: Family, window: int | None, tmp_path: Path) -> None:
    overrides = {"sliding_window": window} if window else {}
    runner = runner_of(tmp_path, family, "float32", **overrides)
    batch = Batch.of(runner, [prompt(299)], 1, budget=64)
    batch.run()  # computes positions 0..298 and samples the token at 299
    arena = runner.bound_arena
    expected = next_logits(runner, batch)
    assert torch.equal(next_logits(runner, batch), expected)
    for index, (block, _) in enumerate(batch.sequences[0].table):
        kept = arena[block].clone()
        arena[block] = 0
        changed = not torch.equal(next_logits(runner, batch), expected)
        arena[block] = kept
        # with a window of 64, the query at 299 sees keys 236..299: blocks 14 (224..239) and later
        assert changed == (window is None or index >= 14), f"block {index}"


@pytest.mark.parametrize("family", FAMILIES)
def test_zeroing_any_cached_block_changes_the_tokens(family: Family, tmp_path: Path) -> None:
    """The tokens change, not only the logits. Every test of token equality relies on this."""
    runner = runner_of(tmp_path, family, std=0.3)  # at 0.02, attention would be negligible in the residual stream
    first = Batch.of(runner, [prompt(200)], 40)
    [expected] = first.run()
    arena, [filled] = runner.bound_arena, first.sequences

    def behind_cached_blocks() -> list[int]:
        again = Sequence(filled.prompt_ids, [], filled.sampling, filled.stopping, table=filled.table)
        again.num_computed = 192
        return Batch(runner, [again]).run()[0]

    assert behind_cached_blocks() == expected
    for index in range(192 // 16):
        block = filled.table[index].block
        kept = arena[block].clone()
        arena[block] = 0
        assert behind_cached_blocks() != expected, f"block {index}"
        arena[block] = kept


def test_copied_blocks_give_the_same_bits(tmp_path: Path) -> None:
    """A fork whose last block is a copy has the same outputs as the original."""
    runner, ids = runner_of(tmp_path, "llama"), prompt(40)
    batch = Batch.of(runner, [ids, ids], 8)
    first, second = batch.sequences
    batch.step([Chunk(first, 40)])
    runner.copy_blocks([first.table[2].block], [second.table[2].block])
    second.table = BlockTable([*first.table[:2], *second.table[2:]])
    second.num_computed, second.output_ids = 40, list(first.output_ids)
    first_outputs, second_outputs = batch.run()
    assert first_outputs == second_outputs
    assert torch.equal(torch.stack(batch.logits[0][1:]), torch.stack(batch.logits[1]))


def test_the_oracle_agrees_with_a_batch_and_leaves_the_arena_bound(tmp_path: Path) -> None:
    runner, ids = runner_of(tmp_path, "qwen3"), prompt(50)
    outputs = Batch.of(runner, [ids, prompt(9)], 12).run()[0]
    bound = runner.bound_arena
    greedy, stopping = SamplingParams(temperature=0.0), StoppingParams(max_tokens=12)
    oracle = Oracle(runner)
    assert oracle.generate(ids, greedy, stopping) == outputs
    assert oracle.generate(ids, greedy, stopping, chunk=7) == outputs
    assert runner.bound_arena is bound
    seeded = SamplingParams(temperature=1.0, seed=5)
    drawn = oracle.generate(ids, seeded, stopping)
    assert drawn == oracle.generate(ids, seeded, stopping, chunk=16)
    assert drawn != oracle.generate(ids, seeded, stopping, sample_index=1)


def test_negative_slots_are_not_written_and_no_rows_give_no_logits(tmp_path: Path) -> None:
    for family in ("llama", "opt"):
        runner = runner_of(tmp_path / family, family)
        arena = poisoned_arena(runner, 4)
        runner.bind(arena)
        batch = Batch.of(runner, [prompt(20)], 1)
        runner.bind(arena)
        step = lay_out([Chunk(batch.sequences[0], 20)], 16).batch
        step.block_tables = (np.array([[0, 1]], np.int32),)
        step.slot_mappings = (np.full(20, -1, np.int64),)
        step.logits_rows = np.array([], np.int64)
        assert runner.step(step).shape == (0, 512)
        assert (arena == 0xFF).all()
        step.slot_mappings = (np.arange(20, dtype=np.int64),)
        runner.step(step)
        assert (arena[2:] == 0xFF).all() and not (arena[:2] == 0xFF).all()
