"""Decode in fixed shapes: the choice of a bucket, and padding rows that change no bits. On a CPU, a bucket's replay is
the same computation run eagerly over the same padded buffers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from common.types import BlockRef, SamplingParams, StoppingParams
from engine import start_up
from engine.block_table import BlockTable
from engine.graphs import DecodeGraphs, bucket_sizes
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Chunk, Sequence, lay_out
from engine.tiny import make_checkpoint
from kernels.providers.base import AttentionBatch
from testing.engine import Batch, poisoned_arena


def test_bucket_sizes() -> None:
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(7) == (1, 2, 4, 7)
    assert bucket_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert bucket_sizes(130)[-5:] == (80, 96, 112, 128, 130)
    assert all(b - a <= 16 for a, b in zip(bucket_sizes(4096), bucket_sizes(4096)[1:], strict=False))


def padded(runner: ModelRunner, max_num_seqs: int, sizes: tuple[int, ...]) -> DecodeGraphs:
    """Captures the runner's decode steps in buckets, with its bound arena."""
    graphs = start_up.new_graphs(runner, max_num_seqs)
    for size in reversed(sizes):
        assert start_up.capture_bucket(runner, graphs, size, runner.binding.caches)
    return graphs


@pytest.mark.parametrize("family", ["llama", "opt"])
@torch.inference_mode()
def test_padding_changes_no_bit_and_writes_nothing(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, seed=2, std=0.1)  # type: ignore[arg-type]
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, max_model_len=96, deterministic=True))
    prompts = [list(range(5, 5 + n)) for n in (3, 16, 17, 40, 9)]
    plain = Batch.of(runner, prompts, 12, budget=4096)
    expected = plain.run()
    bits = [torch.stack(rows) for rows in plain.logits]

    again = Batch.of(runner, prompts, 12, budget=4096)
    graphs = padded(runner, 8, bucket_sizes(8))
    runner.binding.graphs = graphs
    taken: list[int] = []
    run = graphs.run
    graphs.run = lambda batch: taken.append(len(batch.token_ids)) or run(batch)  # type: ignore[func-returns-value,method-assign,assignment]
    assert again.run() == expected
    assert all(torch.equal(torch.stack(rows), bit) for rows, bit in zip(again.logits, bits, strict=True))
    assert taken == [5] * 11  # every step except prefill, in the bucket of 8

    used = {ref.block for sequence in again.sequences for ref in sequence.table}
    unused = [block for block in range(len(runner.bound_arena)) if block not in used]
    assert (runner.bound_arena[unused] == 0xFF).all()


@torch.inference_mode()
def test_buckets_share_buffers_without_seeing_each_other(tmp_path: Path) -> None:
    """The size of the steps varies, so every bucket finds data of other buckets in the buffers."""
    make_checkpoint(tmp_path, "llama", seed=2, std=0.1)
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, max_model_len=96, deterministic=True))
    runner.bind(poisoned_arena(runner, 40))
    sequences = []
    for number in range(8):
        greedy = SamplingParams(temperature=0.0)
        table = BlockTable(BlockRef(5 * number + i, 1) for i in range(5))
        sequences.append(Sequence(list(range(9, 20 + 7 * number)), [], greedy, StoppingParams(), table=table))
        runner.step(lay_out([Chunk(sequences[-1], sequences[-1].num_tokens - 1)], 16).batch)
        sequences[-1].num_computed = sequences[-1].num_tokens - 1
    graphs = padded(runner, 8, bucket_sizes(8))
    arena = runner.bound_arena.clone()
    for chosen in ([7], [0, 1, 2, 3, 4, 5, 6, 7], [3], [6, 2, 5], [1, 0], [7, 6, 5, 4, 3], [2]):
        runner.bound_arena.copy_(arena)
        batch = lay_out([Chunk(sequences[i], 1) for i in chosen], 16).batch
        expected = runner.step(batch).clone()
        others = [ref.block for i, s in enumerate(sequences) if i not in chosen for ref in s.table]
        runner.bound_arena[others] = 0xFF
        kept = runner.bound_arena.clone()
        assert torch.equal(graphs.run(batch), expected)
        assert torch.equal(runner.bound_arena, kept)  # rows of an earlier step are not written again


@torch.inference_mode()
def test_only_whole_decode_steps_that_fit_are_taken(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, max_model_len=64))
    plain = Batch.of(runner, [[5, 6, 7]] * 5, 2)
    graphs = padded(runner, 4, (4,))
    plain.step([Chunk(sequence, 3) for sequence in plain.sequences])

    def step(count: int, num_tokens: int = 1):  # type: ignore[no-untyped-def]
        return lay_out([Chunk(sequence, num_tokens) for sequence in plain.sequences[:count]], 16).batch

    assert graphs.takes(step(1)) and graphs.takes(step(4))
    assert not graphs.takes(step(5))
    some_logits = step(4)
    some_logits.logits_rows = np.array([0, 2], np.int64)
    assert not graphs.takes(some_logits)
    for sequence in plain.sequences:
        sequence.num_computed = 0
    assert not graphs.takes(step(2, 3))
    assert not start_up.new_graphs(runner, 4).takes(step(1))  # nothing captured


@torch.inference_mode()
def test_the_provider_prepares_outside_of_the_graph(tmp_path: Path) -> None:
    """`prepare` is called once per step, with fixed shapes and addresses, after the padding has been written."""
    make_checkpoint(tmp_path, "llama")
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, max_model_len=64))
    batch = Batch.of(runner, [[5, 6, 7]] * 3, 2)
    batch.step([Chunk(sequence, 3) for sequence in batch.sequences])
    seen: list[tuple[AttentionBatch, list[int], int]] = []
    keep = runner.attention.prepare
    runner.attention.prepare = lambda b: seen.append((b, b.host.context_lens.tolist(), b.max_context_len)) or keep(b)  # type: ignore[func-returns-value,method-assign,assignment]
    graphs = padded(runner, 4, (2, 4))
    assert [(len(lens), longest) for _, lens, longest in seen] == [(4, 1), (2, 1)]  # the largest bucket first
    graphs.run(lay_out([Chunk(sequence, 1) for sequence in batch.sequences], 16).batch)
    last, lens, longest = seen[-1]
    assert len(seen) == 3 and last.is_static and lens == [4, 4, 4, 0] and longest == 4
    assert last.host.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4] and last.max_q_len == 1
    assert last.context_lens.data_ptr() == seen[0][0].context_lens.data_ptr()


def test_what_cannot_be_captured_is_counted_and_computed_eagerly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from kernels.cpu import fallbacks

    make_checkpoint(tmp_path, "llama")
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, max_model_len=64, device="cpu"))
    runner.bind(poisoned_arena(runner, 4))

    def refuse(work: object) -> object:
        raise RuntimeError("operation not permitted when stream is capturing\nand a stack trace")

    runner.device.record = refuse  # type: ignore[method-assign,assignment]
    runner.device.compute_capability, runner.attention.capturable = (9, 0), True
    before = fallbacks().get("decode graph", 0)
    start_up.capture(runner, 4)
    assert runner.binding.graphs is not None and runner.binding.graphs.sizes == []
    assert fallbacks()["decode graph"] == before + 1  # the buckets of 2 and 1 are not tried
    assert start_up.graph_bytes(runner, 4) == 0
    if before == 0:
        assert "decode graph runs eagerly: operation not permitted when stream is capturing" in caplog.text


def test_a_capture_that_costs_the_device_is_not_passed_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, max_model_len=64, device="cpu"))
    runner.bind(poisoned_arena(runner, 4))

    def fail(*_: object) -> object:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    runner.device.record = runner.device.wait = fail  # type: ignore[method-assign,assignment]
    with torch.inference_mode(), pytest.raises(torch.AcceleratorError):
        start_up.capture_bucket(runner, start_up.new_graphs(runner, 4), 4, runner.binding.caches)


def test_on_a_cpu_nothing_is_captured(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    runner = ModelRunner(RunnerSettings(tmp_path, num_threads=1, max_model_len=64, device="cpu"))
    runner.bind(poisoned_arena(runner, 4))
    start_up.capture(runner, 8)
    assert runner.binding.graphs is None
