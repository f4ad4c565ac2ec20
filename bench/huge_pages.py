"""Compares decode steps whose KV blocks are in small pages with those whose blocks are in huge pages (`python -m
bench.huge_pages`).

Both arenas are files in /dev/shm. The block store's thread has moved one of them into huge pages, which it also times.
The model has Llama's architecture and random weights. Steps with both arenas are measured in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from bench.engine import MODEL
from bench.rounds import ratio, turned
from block_store.arena.arena import Arena
from block_store.arena.promotion import Promotion
from common.telemetry import fallback_counts
from engine.model_runner import ModelRunner, RunnerSettings
from engine.rows import DecodeRows
from testing.engine import Batch


def step_ms(runner: ModelRunner, batch: Batch, arena: Arena, steps: int) -> float:
    """Returns the median duration of the steps in milliseconds, after one that warms up."""
    runner.bind(arena.data)
    rows = DecodeRows(runner.layout.block_size, len(runner.layout.groups))
    taken = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        runner.step(rows.lay_out(batch.sequences).batch)
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.huge_pages", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="directory with a config.json; weights are random")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=576)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    runner = ModelRunner(RunnerSettings(args.model, load_format="dummy", device="cpu"))
    per_sequence = -(-(args.context + 1) // runner.layout.block_size) * len(runner.layout.groups)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ll-bench-") as directory:
        num_blocks = max(args.batches) * per_sequence
        arenas = {name: Arena.create(Path(directory) / name, runner.layout, num_blocks) for name in ("small", "huge")}
        for arena in arenas.values():
            arena.data[:] = 0
        began = time.perf_counter()
        Promotion(arenas["huge"].mapping).join()
        print(f"{len(arenas['huge'].mapping) >> 20} MiB became huge in {time.perf_counter() - began:.1f} s")
        if refused := fallback_counts():
            raise SystemExit(f"no huge pages here: {refused}")
        for size in args.batches:
            batch = Batch.of(runner, [[1] * args.context] * size, 1)
            for sequence in batch.sequences:
                sequence.num_computed = args.context - 1
            found: dict[str, list[float]] = {name: [] for name in arenas}
            for number in range(args.rounds):
                for name in turned([*arenas], number):
                    found[name].append(step_ms(runner, batch, arenas[name], args.steps))
            medians = [f"{name} {statistics.median(each):.2f} ms" for name, each in found.items()]
            print(f"decode batch {size}: {', '.join(medians)}, {ratio(zip(*found.values(), strict=True))}")


if __name__ == "__main__":
    main()
