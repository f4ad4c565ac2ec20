"""Prints the GPU time of each kernel in decode steps and in a prefill step, as torch's profiler measures it.

    python tools/gpu/profile_steps.py --model models/configs/llama-3.1-8b [--deterministic]

Weights are random. The time of a step is its total divided by `STEPS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from engine import start_up
from engine.model_runner import ModelRunner, RunnerSettings
from engine.rows import DecodeRows
from engine.sampler import Sampler
from engine.sequence import Chunk
from testing.engine import Batch

STEPS = 4
ROWS = 18


def show(what: str, step: Callable[[], object], times: int) -> None:
    """Runs a step a few times, and then `times` times under the profiler. Prints its kernels, slowest first."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    print(f"{what}, {times} times")
    print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=ROWS, max_name_column_width=60))


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    return [[(token + 97 * number) % vocab for token in range(length)] for number in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    how = {"attention_backend": options.attention_backend, "deterministic": options.deterministic}
    longest = max(options.context, options.prompt) + 1
    runner = ModelRunner(RunnerSettings(options.model, load_format="dummy", max_model_len=longest, **how))
    print(runner.numerics)
    vocab = runner.config.vocab_size
    for size in options.batches:
        batch = Batch.of(runner, prompts(size, options.context, vocab), 1)
        runner.bound_arena.zero_()
        start_up.capture(runner, size)
        for sequence in batch.sequences:
            sequence.num_computed = options.context - 1
        rows, sampler = DecodeRows(runner.layout.block_size, len(runner.layout.groups)), Sampler()

        def decode(batch: Batch = batch, rows: DecodeRows = rows, sampler: Sampler = sampler) -> None:
            sampler.draw(runner.step(rows.lay_out(batch.sequences).batch), batch.sequences)

        show(f"decode step, batch {size}, context {options.context}", decode, STEPS)

    def prefill() -> None:
        batch = Batch.of(runner, prompts(1, options.prompt, vocab), 1)
        batch.step([Chunk(batch.sequences[0], options.prompt)])

    show(f"prompt of {options.prompt} tokens", prefill, 1)


if __name__ == "__main__":
    main()
