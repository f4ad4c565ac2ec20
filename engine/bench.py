"""`python -m engine.bench`: tokens per second of decode steps (forward and sampling) at several batch sizes.

Random weights of a 125M Llama shape, a context of 512 per sequence, greedy. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine.runner import ModelRunner, RunnerSettings
from engine.sequence import Chunk
from engine.testing import Batch
from engine.tiny import hf_config

SHAPE_125M = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
}


def make_runner(dtype: str, num_threads: int) -> ModelRunner:
    """A runner of the 125M shape with dummy weights."""
    with tempfile.TemporaryDirectory() as directory:
        config = hf_config("llama") | SHAPE_125M
        (Path(directory) / "config.json").write_text(json.dumps(config))
        settings: dict[str, Any] = {"dtype": dtype, "num_threads": num_threads, "load_format": "dummy"}
        return ModelRunner(RunnerSettings(directory, **settings))


def decode(runner: ModelRunner, num_seqs: int, context: int, steps: int) -> dict[str, float]:
    """Median milliseconds of a decode step of `num_seqs` sequences behind `context` tokens, and tokens per second."""
    batch = Batch.of(runner, [[token % 31000 for token in range(context)]] * num_seqs, steps + 4)
    for sequence in batch.sequences:
        sequence.num_computed = context - 1  # KV is zeros instead of computed: time does not depend on it
    runner.bound_arena.zero_()
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        batch.step([Chunk(sequence, 1) for sequence in batch.sequences])
        times.append(time.perf_counter() - start)
    median = statistics.median(times[3:])
    return {"batch": num_seqs, "ms": round(median * 1e3, 3), "tokens_per_s": round(num_seqs / median, 1)}


def prefill(runner: ModelRunner, num_tokens: int) -> dict[str, float]:
    """Milliseconds of one prompt of `num_tokens` in one chunk, best of three."""
    times = []
    for _ in range(3):
        batch = Batch.of(runner, [[token % 31000 for token in range(num_tokens)]], 1)
        start = time.perf_counter()
        batch.step([Chunk(batch.sequences[0], num_tokens)])
        times.append(time.perf_counter() - start)
    return {"tokens": num_tokens, "ms": round(min(times) * 1e3, 2), "tokens_per_s": round(num_tokens / min(times), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--num-threads", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    runner = make_runner(args.dtype, args.num_threads)
    load_s = round(time.perf_counter() - start, 2)
    print(runner.numerics)
    print(f"weights {runner.weights_bytes / 1e6:.0f} MB loaded in {load_s} s, threads {runner.num_threads}")
    runs = [decode(runner, size, args.context, args.steps) for size in args.batches]
    for run in runs:
        print(f"decode batch {run['batch']:3}: {run['ms']:8.2f} ms  {run['tokens_per_s']:8.1f} tok/s")
    prompt = prefill(runner, args.context)
    print(f"prefill {prompt['tokens']} tokens: {prompt['ms']:.1f} ms  {prompt['tokens_per_s']:.0f} tok/s")
    print(json.dumps({
        "bench": "engine", "numerics": runner.numerics, "threads": runner.num_threads, "context": args.context,
        "torch": torch.__version__, "load_s": load_s, "decode": runs, "prefill": prompt,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
