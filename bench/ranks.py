"""Compares the time of a step and the weights on one rank with those on several ranks (`python -m bench.ranks`).

The runners alternate, one step at a time, so that other load on the machine affects all of them. All have the same
number of threads in total, except one runner with a single thread. Two stages with one thread each would take as long
as that runner if they never computed at the same time. Weights are random. Ranks other than the first are separate
processes, and each runner has an arena in shared memory.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.binding import TORCH_DTYPES
from engine.model_runner import ModelRunner, RunnerSettings
from engine.ranks.leader import Leader
from engine.ranks.micro_batches import how_many
from engine.start_up import scratch_batch, warm_up
from engine.step import StepInput
from testing.ranks import shared_arena

STEPS = {
    "decode, 1 sequence": (1, 1),
    "decode, 16 sequences": (1, 16),
    "decode, 64 sequences": (1, 64),
    "prefill, 256 tokens": (256, 1),
    "prefill, 512 tokens": (512, 1),
}
"""The steps: (tokens of each sequence, number of sequences)."""
CONTEXT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/configs/llama-125m"))
    parser.add_argument("--threads", type=int, default=2, help="threads of each runner, over all ranks")
    parser.add_argument("--sizes", type=int, nargs="*", default=[2], help="tensor parallel sizes, besides 1")
    parser.add_argument("--stages", type=int, nargs="*", default=[2], help="pipeline parallel sizes, besides 1")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    runners = {name: runner_of(args, **how) for name, how in shapes_of(args).items()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for number, (name, runner) in enumerate(runners.items()):
            warm_up(runner)
            shared_arena(runner, Path(directory) / str(number), 1)
            print(f"{name:18} weights: {memory_of(runner)}")
        for name, (chunk, num_seqs) in STEPS.items():
            report(name, runners, args.rounds, (chunk, num_seqs))
    for runner in runners.values():
        if isinstance(runner.seat, Leader):
            runner.seat.close()


def shapes_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the settings of each runner, by its name."""
    return {
        "1 rank, 1 part": {},
        "1 rank, 4 parts": {"reduction_parts": 4},
        "1 rank, 1 thread": {"num_threads": 1},
        **{f"{size} ranks": {"tensor_parallel_size": size} for size in args.sizes},
        **{f"{count} stages": {"pipeline_parallel_size": count} for count in args.stages},
    }


def runner_of(args: argparse.Namespace, **how: Any) -> ModelRunner:
    return ModelRunner(RunnerSettings(args.model, load_format="dummy", **({"num_threads": args.threads} | how)))


def memory_of(runner: ModelRunner) -> str:
    """Returns a text with the size of each rank's weights and the anonymous resident memory of each follower's process.
    This process contains the first ranks of all runners, so its memory is not included.
    """
    followers = runner.seat.followers if isinstance(runner.seat, Leader) else []
    own = runner.weights_bytes - sum(follower.weights_bytes for follower in followers)
    others = [f"{f.weights_bytes / 2**20:.0f} MiB (process: {anonymous_mib(f.process.pid)} MiB)" for f in followers]
    return ", ".join([f"{own / 2**20:.0f} MiB", *others])


def anonymous_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024


def report(name: str, runners: dict[str, ModelRunner], rounds: int, shape: tuple[int, int]) -> None:
    """Prints, for each runner, the median time of a step and the number of bytes that its ranks send."""
    times: dict[str, list[float]] = {each: [] for each in runners}
    batches = {each: scratch_batch(runner, *shape, CONTEXT) for each, runner in runners.items()}
    for _ in range(rounds):
        for each, runner in runners.items():
            runner.device.use_threads(runner.num_threads)  # another runner has changed the setting of this thread
            start = time.perf_counter()
            runner.step(batches[each])
            times[each].append(time.perf_counter() - start)
    first = statistics.median(next(iter(times.values())))
    for each, runner in runners.items():
        median = statistics.median(times[each])
        sent = bytes_sent(runner, batches[each])
        parts = how_many(len(batches[each].token_ids), runner.place.stage.count)
        row = f"{name:22} {each:18} {median * 1e3:8.2f} ms  {median / first:5.2f}x  {sent / 2**20:8.3f} MiB sent"
        print(row + (f", {parts} micro-batches" if parts > 1 else ""))


def bytes_sent(runner: ModelRunner, batch: StepInput) -> int:
    """Returns the number of bytes that all ranks together send in a step: two sums per layer to every other rank of the
    stage, hidden states to the next stage, and logits to the first rank.
    """
    c, place, tokens = runner.config, runner.place, len(batch.token_ids)
    shares, stages = place.shard.size, place.stage.count
    sums = 2 * c.num_layers * tokens * c.hidden_size * 4 * (shares - 1) * shares
    states = (stages - 1) * shares * tokens * c.hidden_size * TORCH_DTYPES[runner.dtype].itemsize
    logits = len(batch.logits_rows) * c.vocab_size * 4
    return sums + states + (logits if stages > 1 else logits * (shares - 1) // shares)


if __name__ == "__main__":
    main()
