"""Measures a decode worker's step, excluding the forward pass (`python -m bench.decode_worker`).

Runs a real worker with a real arena and a private Redis, but without RPC. Prompts differ in length, so the last blocks
of the sequences become full in different steps. `outside` is the step thread's CPU time excluding the forward pass, as
the mean over all steps. `ledger_cpu` and `ledger` are the CPU time and the wall time of ledger calls. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from block_store.redis import redis_server
from common.types import SamplingParams, StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from engine.tiny import make_checkpoint
from testing.decode import DecodeBench

RESERVE = 16
"""The number of blocks that the worker allocates in advance, which is a decode worker's default minimum."""


class Stopwatch:
    """A stopwatch that adds up the wall time and the CPU time of certain calls, in seconds."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def times(self, owner: Any, *names: str) -> None:
        """Starts measuring the methods `names` of `owner`."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu

        return run


def steps(bench: DecodeBench, groups: int, samples: int, num_steps: int) -> dict[str, float]:
    """Decodes `groups` requests of `samples` sequences each for `num_steps` steps, after five steps to warm up. Returns
    the results. Times are in us per step or, with the suffix "_per_seq", per step and sequence.
    """
    size, vocab = bench.block_size, bench.runner.config.vocab_size
    sampling = SamplingParams(temperature=0.8, seed=1, num_sequences=samples)
    for handle in range(groups):
        prompt = [5 + (7 * handle + i) % (vocab - 5) for i in range(2 * size + handle % size)]
        bench.submit(handle, prompt, sampling, StoppingParams(max_tokens=num_steps + 20))
    for _ in range(5):
        bench.worker.step()
    forward, ledger = Stopwatch(), Stopwatch()
    forward.times(bench.runner, "step")
    ledger.times(bench.held.holder, "alloc", "seal", "release")
    walls, began = [], time.thread_time()
    for _ in range(num_steps):
        start = time.perf_counter()
        bench.worker.step()
        walls.append(time.perf_counter() - start)
    outside = (time.thread_time() - began - forward.cpu) / num_steps
    del bench.runner.step  # type: ignore[method-assign]  # restores the runner's own method
    batch = groups * samples
    return {
        "batch": batch, "samples": samples, "step_us": round(statistics.median(walls) * 1e6),
        "forward_us": round(forward.wall / num_steps * 1e6), "outside_us": round(outside * 1e6),
        "outside_us_per_seq": round(outside / batch * 1e6, 2), "ledger_cpu_us": round(ledger.cpu / num_steps * 1e6),
        "ledger_us": round(ledger.wall / num_steps * 1e6),
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.decode_worker", description=__doc__)
    parser.add_argument("--model", help="directory with a config.json; its weights are random. Default: a tiny one")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--samples", type=int, default=1, help="sequences of each request")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true", help="the forward pass call by call")
    return parser.parse_args()


def main() -> None:
    args = parse()
    runs = []
    with tempfile.TemporaryDirectory(prefix="ll-bench-", dir="/dev/shm") as name:  # the arena is memory, not a file
        directory = Path(name)
        redis = redis_server.connect(None, directory)
        model = args.model or make_checkpoint(directory / "model")
        settings = RunnerSettings(
            model, load_format="dummy", num_threads=args.num_threads, device="cpu", enforce_eager=args.enforce_eager,
            max_model_len=min(512, 64 + args.steps),
        )  # fmt: skip
        runner = ModelRunner(settings)
        for batch in args.batches:
            blocks = RESERVE + batch * (settings.max_model_len or 0) // runner.layout.block_size + batch
            bench = DecodeBench(
                runner, directory / str(batch), redis.client, num_blocks=blocks, max_num_seqs=batch, reserve=RESERVE
            )
            run = steps(bench, batch // args.samples, args.samples, args.steps)
            runs.append(run)
            print("  ".join(f"{key} {value}" for key, value in run.items()), flush=True)
            bench.run()
            bench.held.give_up_reserve()
            bench.close()
        redis.close()
    print(
        json.dumps({"bench": "decode_step", "model": args.model or "tiny", "eager": args.enforce_eager, "runs": runs})
    )


if __name__ == "__main__":
    main()
