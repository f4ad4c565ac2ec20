"""Prepares a runner before it serves. Warms the runner up, measures its peak memory, and captures CUDA graphs."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from engine.graphs import DecodeGraphs, bucket_sizes
from engine.model_runner import ModelRunner
from engine.models.attention import LayerCache
from engine.step import StepInput
from kernels.cpu.loader import on_triton
from kernels.cpu.selection import count_fallback
from kernels.providers.base import SPLIT_QUERIES
from kernels.sampling import log_softmax_top, sample

logger = logging.getLogger("engine")

PROFILE_MAX_KEYS = 1 << 21
"""Limit on the contexts of profiling passes, which keeps startup short. In a decode pass, it limits the number of keys
of all sequences. In a prefill pass, it limits the number of queries of a prompt times the number of keys, but the
context is never shorter than the chunk.
"""
PROFILE_LAYERS_CPU = 2
"""Number of layers that a profiling pass runs on a CPU. More layers would hardly raise the peak, because only the
output of a layer stays in memory.
"""


def warm_up(runner: ModelRunner) -> None:
    """Runs a prefill and a decode step on scratch memory, so that requests do not wait for the setup of the kernels. If
    kernels are compiled at their first launch, also runs further variants of steps.
    """
    _scratch_step(runner, min(16, runner.max_model_len), 1, min(16, runner.max_model_len))
    logits = _scratch_step(runner, 1, 1, 1)
    if on_triton(logits):
        _compile_the_rest(runner, logits)


def profile(runner: ModelRunner, max_num_batched_tokens: int, max_num_seqs: int, *, graphs: bool = False) -> int:
    """Returns the peak bytes of activations, on all ranks together, over the largest steps, with logits for every row.
    These include a prefill step of at most `max_num_batched_tokens` tokens, and a decode step of `max_num_seqs`
    sequences with every sampling filter. With `graphs`, the result includes an estimate of the memory that
    `capture(max_num_seqs)` will need.

    All block tables name one scratch block, so KV takes little memory. To keep startup short, PROFILE_MAX_KEYS limits
    the contexts, and on a CPU, a pass ends after PROFILE_LAYERS_CPU layers. The result is kept in `runner.peaks`.
    """
    asked = (max_num_batched_tokens, max_num_seqs, graphs)
    if (known := runner.peaks.get(asked)) is not None:
        return known
    warm_up(runner)
    chunk = min(max_num_batched_tokens, runner.max_model_len)
    num_prompts = min(max_num_seqs, max_num_batched_tokens // chunk)

    def largest_steps() -> None:
        _scratch_step(runner, chunk, num_prompts, min(runner.max_model_len, max(chunk, PROFILE_MAX_KEYS // chunk)))
        if runner.device.compute_capability is not None:  # with few queries, keys may be split into partial results
            few = min(chunk, SPLIT_QUERIES)
            _scratch_step(runner, few, 1, few)
        context = min(runner.max_model_len, max(1, PROFILE_MAX_KEYS // max_num_seqs))
        # The width of the table determines the size of partial results.
        logits = _scratch_step(runner, 1, max_num_seqs, context, width=runner.max_blocks)
        floats, ints = [0.5] * max_num_seqs, [1] * max_num_seqs
        sample(logits, floats, ints, floats, floats, ints, ints, ints)

    with _shallow(runner):
        peak = runner.device.peak_bytes(largest_steps) * runner.place.size
    if graphs:
        peak += graph_bytes(runner, max_num_seqs)
    runner.device.release()
    runner.peaks[asked] = peak
    return peak


@torch.inference_mode()
def capture(runner: ModelRunner, max_num_seqs: int) -> None:
    """Captures decode steps of up to `max_num_seqs` sequences over the bound arena, in buckets. Later steps replay
    them. Does nothing if the model, the device or the settings do not allow graphs. If a bucket fails, the failure is
    logged and counted, and no further bucket is tried. Steps that fit no bucket are computed eagerly.
    """
    if not _can_capture(runner):
        return
    runner.device.enter()
    bound, sizes = runner.binding, bucket_sizes(max_num_seqs)
    bound.graphs = graphs = new_graphs(runner, max_num_seqs)
    for size in reversed(sizes):
        if not capture_bucket(runner, graphs, size, bound.caches):
            break
    captured = len(graphs.sizes)
    logger.info("captured %d of %d CUDA graphs of up to %d sequences", captured, len(sizes), max_num_seqs)


def _can_capture(runner: ModelRunner) -> bool:
    if runner.device.compute_capability is None or runner.settings.enforce_eager:
        return False
    if runner.attention_by_layer:
        logger.info("no CUDA graphs: the model is defined by transformers, or it has several KV groups")
        return False
    if runner.config.experts is not None:
        logger.info("no CUDA graphs: experts are chosen on the host")
        return False
    if not runner.attention.capturable:
        logger.info("no CUDA graphs: attention provider %s cannot be captured", runner.attention.name)
    return runner.attention.capturable


def new_graphs(runner: ModelRunner, max_num_seqs: int) -> DecodeGraphs:
    """Returns graphs that have no buckets yet."""
    logits = torch.empty((max_num_seqs, runner.config.vocab_size), device=runner.device.torch_device)
    return DecodeGraphs(runner.device, runner.attention, runner.max_blocks, logits)


def capture_bucket(runner: ModelRunner, graphs: DecodeGraphs, size: int, caches: Mapping[int, LayerCache]) -> bool:
    """Captures one bucket. Returns whether that succeeded; a failure is logged and counted. Raises the device's error
    if the device is no longer usable.
    """
    try:
        graphs.capture(size, lambda tokens, step: runner.model.forward(tokens, step, caches, None))
    except Exception as error:  # errors of torch, CUDA or Triton
        runner.device.wait()
        count_fallback("decode graph", (str(error) or repr(error)).splitlines()[0], "eagerly")
        return False
    return True


@torch.inference_mode()
def graph_bytes(runner: ModelRunner, max_num_seqs: int) -> int:
    """Returns an estimate of the bytes of memory that `capture` will need. Captures the two largest buckets, and
    assumes that each smaller bucket takes as much memory as the second one.
    """
    if not _can_capture(runner):
        return 0
    sizes = bucket_sizes(max_num_seqs)[::-1]
    marks = [runner.device.used_bytes()]
    with runner.using(runner.new_arena(1)):
        graphs = new_graphs(runner, max_num_seqs)
        for size in sizes[:2]:
            if not capture_bucket(runner, graphs, size, runner.binding.caches):
                break
            marks.append(runner.device.used_bytes())
    growth = [max(0, after - before) for before, after in itertools.pairwise(marks)]
    return growth[0] + growth[-1] * (len(sizes) - 1) if growth else 0


def _compile_the_rest(runner: ModelRunner, logits: torch.Tensor) -> None:
    """Runs more variants of steps and kernels, so that they are compiled. `logits` is fp32 [1, vocab] of any step."""
    chunk = min(2, runner.max_model_len)
    _scratch_step(runner, chunk, 2, chunk)  # short chunks use different tiles from long ones
    for bits in range(runner.max_blocks.bit_length() + 1):  # wide tables are read in a power of two of splits
        _scratch_step(runner, 1, 1, 1, width=min(1 << bits, runner.max_blocks))
    log_softmax_top(logits, torch.zeros(1, dtype=torch.int64, device=logits.device), 1)
    with runner.using(runner.new_arena(2)):
        runner.copy_blocks([0], [1])


@contextlib.contextmanager
def _shallow(runner: ModelRunner) -> Iterator[None]:
    """On a CPU, reduces the runner's model to its first PROFILE_LAYERS_CPU layers inside a `with` block."""
    model = runner.model
    if runner.device.compute_capability is None:
        runner.model = model.shallow(PROFILE_LAYERS_CPU)
    try:
        yield
    finally:
        runner.model = model


def _scratch_step(
    runner: ModelRunner, chunk: int, num_seqs: int, context: int, width: int | None = None
) -> torch.Tensor:
    """Computes the step of `scratch_batch` on a scratch arena of one block."""
    with runner.using(runner.new_arena(1)):
        return runner.step(scratch_batch(runner, chunk, num_seqs, context, width))


def scratch_batch(runner: ModelRunner, chunk: int, num_seqs: int, context: int, width: int | None = None) -> StepInput:
    """Returns a step that computes the last `chunk` of `context` positions of each of `num_seqs` sequences, with logits
    of all of them. All entries of the block tables name block 0. `width` is the number of columns of the block table;
    None means as many as the context needs.
    """
    num_tokens, block_size, groups = chunk * num_seqs, runner.layout.block_size, len(runner.layout.groups)
    positions = np.tile(np.arange(context - chunk, context, dtype=np.int64), num_seqs)
    return StepInput(
        np.zeros(num_tokens, np.int64),
        positions,
        (positions % block_size,) * groups,
        np.arange(0, num_tokens + 1, chunk, dtype=np.int32),
        np.full(num_seqs, context, np.int32),
        (np.zeros((num_seqs, width or -(-context // block_size)), np.int32),) * groups,
        np.arange(num_tokens, dtype=np.int64),
    )
