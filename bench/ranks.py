"""`python -m bench.ranks`: steps of one model on one rank and on several, side by side.

Every runner takes its turn in each round, so that other load on the machine meets all of them. All have the same number
of threads in total. Random weights, real processes, one arena in shared memory for each runner.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path

from engine.model_runner import ModelRunner, RunnerSettings
from engine.ranks.leader import Leader
from engine.start_up import scratch_batch, warm_up
from engine.step import StepInput
from testing.ranks import shared_arena

STEPS = {"decode, 1 sequence": (1, 1), "decode, 16 sequences": (1, 16), "prefill, 256 tokens": (256, 1)}
"""Tokens of a sequence, and sequences."""
CONTEXT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/configs/llama-125m"))
    parser.add_argument("--threads", type=int, default=2, help="of each runner, over all ranks")
    parser.add_argument("--sizes", type=int, nargs="*", default=[2], help="numbers of ranks, besides 1")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    runners = {"1 rank, 1 part": runner_of(args, 1, None), "1 rank, 4 parts": runner_of(args, 1, 4)}
    runners |= {f"{size} ranks": runner_of(args, size, None) for size in args.sizes}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for number, runner in enumerate(runners.values()):
            warm_up(runner)
            shared_arena(runner, Path(directory) / str(number), 1)
        for name, (chunk, num_seqs) in STEPS.items():
            report(name, runners, args.rounds, (chunk, num_seqs))
    for runner in runners.values():
        if isinstance(runner.seat, Leader):
            runner.seat.close()


def runner_of(args: argparse.Namespace, size: int, parts: int | None) -> ModelRunner:
    how = {"tensor_parallel_size": size, "reduction_parts": parts, "num_threads": args.threads}
    return ModelRunner(RunnerSettings(args.model, load_format="dummy", **how))


def report(name: str, runners: dict[str, ModelRunner], rounds: int, shape: tuple[int, int]) -> None:
    """Prints the median time of a step of each runner, in the runners' order, and what its ranks send."""
    times: dict[str, list[float]] = {each: [] for each in runners}
    batches = {each: scratch_batch(runner, *shape, CONTEXT) for each, runner in runners.items()}
    for _ in range(rounds):
        for each, runner in runners.items():
            start = time.perf_counter()
            runner.step(batches[each])
            times[each].append(time.perf_counter() - start)
    first = statistics.median(next(iter(times.values())))
    for each, runner in runners.items():
        median = statistics.median(times[each])
        sent = bytes_sent(runner, batches[each])
        print(f"{name:22} {each:16} {median * 1e3:8.2f} ms  {median / first:5.2f}x  {sent / 2**20:8.3f} MiB sent")


def bytes_sent(runner: ModelRunner, batch: StepInput) -> int:
    """Returns the bytes that all ranks together send in a step: two sums a layer to every other rank, and logits to the
    first.
    """
    c, others = runner.config, runner.shard.size - 1
    sums = 2 * c.num_layers * len(batch.token_ids) * c.hidden_size * 4 * others * runner.shard.size
    return sums + len(batch.logits_rows) * c.vocab_size * 4 * others // runner.shard.size


if __name__ == "__main__":
    main()
