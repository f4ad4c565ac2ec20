"""A forward pass in one C call has the same bits as one that calls kernel by kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.types import KvCacheDType, SamplingParams
from engine.model_runner import ModelRunner, RunnerSettings
from engine.rows import DecodeRows
from engine.sampler import SampleRow, sample_rows
from engine.sequence import Chunk, lay_out
from engine.step_sampler import Sampler
from engine.tiny import make_checkpoint
from kernels.cpu import forward
from kernels.cpu.loader import current
from testing.engine import Batch
from testing.oracle import Oracle

PROMPTS = [[5 + (7 * i + j) % 500 for j in range(length)] for i, length in enumerate((1, 15, 16, 37, 90))]

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen2-mixed", "gemma2", "gemma3_text", "phi3", "qwen3_moe", "mixtral"
)  # fmt: skip
MIXED = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
"""A model with several KV groups: one layer has full attention, the others have a window."""


@pytest.fixture(autouse=True)
def _ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses our linear layers even if another provider is the default."""
    if forward.entry(current()) is None:
        pytest.skip("no C++ kernels are built")
    monkeypatch.setenv("KERNELS_LINEAR", "simd")


def runner_of(path: Path, dtype: str, threads: int, *, eager: bool, kv: KvCacheDType = "auto") -> ModelRunner:
    how: dict[str, Any] = {"dtype": dtype, "num_threads": threads, "enforce_eager": eager, "kv_cache_dtype": kv}
    return ModelRunner(RunnerSettings(path, **how))


def logits_of(runner: ModelRunner, budget: int) -> list[torch.Tensor]:
    batch = Batch.of(runner, PROMPTS, 6, budget=budget)
    assert (runner.binding.fused is None) == runner.settings.enforce_eager
    batch.run()
    return [torch.stack(rows) for rows in batch.logits]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_as_call_by_call(family: str, dtype: str, threads: int, tmp_path: Path) -> None:
    """With chunks of 16 tokens, some chunks compute no logits. A chunk of 300 contains whole prompts."""
    base: Any = family.removesuffix("-mixed")
    make_checkpoint(tmp_path, base, std=0.1, **(MIXED if base != family else {}))
    call_by_call = logits_of(runner_of(tmp_path, dtype, threads, eager=True), 300)
    runner = runner_of(tmp_path, dtype, threads, eager=False)
    for budget in (16, 300):
        for one, other in zip(call_by_call, logits_of(runner, budget), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_pass_draws_the_tokens_that_are_drawn_after_it(dtype: str, tmp_path: Path) -> None:
    """Greedy and sampled rows, in one C call and call by call. Changed logits are drawn from again."""
    make_checkpoint(tmp_path, std=0.1)
    greedy, sampled = SamplingParams(temperature=0.0), SamplingParams(seed=1, top_k=20, top_p=0.9)
    rows = [greedy, sampled, SamplingParams(seed=2, min_p=0.01)]
    drawn: list[list[int]] = []
    for eager in (False, True):
        runner, sampler = runner_of(tmp_path, dtype, 2, eager=eager), Sampler()
        batch = Batch.of(runner, PROMPTS[:3], 40)
        batch.step([Chunk(sequence, len(sequence.prompt_ids)) for sequence in batch.sequences])
        for sequence, params in zip(batch.sequences, rows, strict=True):
            sequence.sampling = params
        layout, found = DecodeRows(runner.layout.block_size), list[int]()
        for _ in range(30):
            draw = sampler.prepare(batch.sequences)
            assert draw is not None
            logits = runner.step(layout.lay_out(batch.sequences).batch, draw)
            assert draw.has_drawn(logits) != eager
            samples = sampler.draw(logits, batch.sequences)
            assert samples == sample_rows(logits, [SampleRow.of(s) for s in batch.sequences])
            found += (tokens := [sample.token_id for sample in samples])
            assert draw.draw(logits.flip(1)) != tokens
            for sequence, token in zip(batch.sequences, tokens, strict=True):
                sequence.output_ids.append(token)
                sequence.num_computed += 1
        drawn.append(found)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_the_bits_of_a_cache_of_8_bits_do_not_depend_on_chunks(kv: KvCacheDType, tmp_path: Path) -> None:
    """A chunk attends to its own keys and values as they are in the cache. A forward pass in one C call has the same
    bits as one that calls kernel by kernel.
    """
    make_checkpoint(tmp_path, "qwen3", std=0.1)
    call_by_call = logits_of(runner_of(tmp_path, "bfloat16", 1, eager=True, kv=kv), 300)
    runner = runner_of(tmp_path, "bfloat16", 2, eager=False, kv=kv)
    exact = logits_of(runner_of(tmp_path, "bfloat16", 2, eager=False), 300)
    for budget in (7, 300):
        for one, other in zip(call_by_call, logits_of(runner, budget), strict=True):
            assert torch.equal(one, other)
    assert not any(map(torch.equal, call_by_call, exact)), "nothing was rounded"


@pytest.mark.parametrize(("name", "value"), [("token_ids", 512), ("token_ids", -1), ("positions", 1 << 20)])
def test_what_is_out_of_range_is_refused(name: str, value: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    runner = runner_of(tmp_path, "bfloat16", 1, eager=False)
    batch = Batch.of(runner, PROMPTS, 1)
    step = lay_out([Chunk(batch.sequences[3], 20)], 16).batch
    getattr(step, name)[7] = value
    with pytest.raises(ValueError, match="out of range"):
        runner.step(step)


def test_a_pass_whose_arrays_do_not_fit_is_refused_each_time(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    runner = runner_of(tmp_path, "bfloat16", 1, eager=False)
    batch = Batch.of(runner, PROMPTS[2:3], 1)
    step = lay_out([Chunk(batch.sequences[0], 16)], runner.layout.block_size).batch
    expected = runner.step(step).clone()
    unfit = replace(step, block_tables=step.block_tables * 2)  # the model has one KV group
    for _ in range(2):
        with pytest.raises(ValueError, match="longer"):
            runner.step(unfit)
        assert torch.equal(runner.step(step), expected)
    for _ in range(2):
        with pytest.raises(ValueError, match="longer"):
            runner.step(unfit)


def test_wanted_rows_in_another_order_are_computed_call_by_call(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    runner = runner_of(tmp_path, "bfloat16", 1, eager=False)
    batch = Batch.of(runner, PROMPTS, 1)
    step = lay_out([Chunk(batch.sequences[3], 20)], 16).batch
    step.logits_rows = torch.arange(20).numpy()
    ascending = runner.step(step).clone()
    step.logits_rows = torch.arange(19, -1, -1).numpy()
    assert torch.equal(runner.step(step), ascending.flip(0))


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2-mixed"])
def test_the_last_layer_computes_any_wanted_rows(family: str, tmp_path: Path) -> None:
    """Only wanted rows attend in the last layer if they are the last rows of their sequences."""
    base: Any = family.removesuffix("-mixed")
    make_checkpoint(tmp_path, base, std=0.1, **(MIXED if base != family else {}))
    runner = runner_of(tmp_path, "bfloat16", 2, eager=False)
    batch = Batch.of(runner, PROMPTS, 1)
    step = lay_out([Chunk(batch.sequences[index], count) for index, count in ((1, 15), (4, 64), (3, 20))], 16).batch
    step.logits_rows = torch.arange(99).numpy()
    whole = runner.step(step).clone()
    last, empty_first, inside, holes = [14, 78, 98], [76, 77, 78, 98], [3, 14, 20, 21, 98], [12, 14, 78]
    for wanted in (last, empty_first, inside, holes, [98], [0], [], list(range(15, 99))):
        step.logits_rows = torch.tensor(wanted, dtype=torch.int64).numpy()
        assert torch.equal(runner.step(step), whole[wanted]), wanted


def test_chunks_of_the_oracle_do_not_overwrite_each_other(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    oracle = Oracle(runner_of(tmp_path, "bfloat16", 1, eager=False))
    assert torch.equal(oracle.logits(PROMPTS[4], chunk=16), oracle.logits(PROMPTS[4]))


def test_a_sequence_without_a_block_for_its_next_position_is_not_computed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    batch = Batch.of(runner_of(tmp_path, "bfloat16", 1, eager=False), PROMPTS, 1)
    batch.sequences[3].num_computed = len(batch.sequences[3].table) * 16
    with pytest.raises(ValueError, match="no block"):
        DecodeRows(16).lay_out(batch.sequences)
