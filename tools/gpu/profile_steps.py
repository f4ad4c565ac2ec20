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

from bench.engine import decode_batch
from engine.model_runner import ModelRunner, RunnerSettings
from engine.rows import DecodeRows
from engine.sequence import Chunk
from engine.step_sampler import Sampler
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
    sampler = Sampler()
    for size in options.batches:
        batch, rows = decode_batch(runner, size, options.context)

        def decode(batch: Batch = batch, rows: DecodeRows = rows) -> None:
            sampler.draw(runner.step(rows.lay_out(batch.sequences).batch), batch.sequences)

        show(f"decode step, batch {size}, context {options.context}", decode, STEPS)

    def prefill() -> None:
        batch = Batch.of(runner, [[token % runner.config.vocab_size for token in range(options.prompt)]], 1)
        batch.step([Chunk(batch.sequences[0], options.prompt)])

    show(f"prompt of {options.prompt} tokens", prefill, 1)


if __name__ == "__main__":
    main()
