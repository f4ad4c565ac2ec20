"""Measures decode steps and a prompt with blocks of several sizes in turn (`python -m bench.block_sizes`).

Each engine is loaded all the time, and they compute in turn (`bench.engine`), so other load on the machine affects all
of them. Prints the medians, and the rounds' ratios to the first size.
"""

from __future__ import annotations

import argparse
import statistics

from bench.engine import MODEL, decode, prefill
from bench.rounds import ratio, turned
from engine.model_runner import ModelRunner, RunnerSettings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.block_sizes", description=__doc__)
    parser.add_argument("--model", default=str(MODEL), help="directory with a config.json; its weights are random")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 128], help="block sizes in tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="batch sizes of decode steps")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence, and of the prompt")
    parser.add_argument("--steps", type=int, default=20, help="steps of a measurement, whose median counts")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each")
    args = parser.parse_args()
    longest = args.context + args.steps + 64
    runners = {
        size: ModelRunner(RunnerSettings(args.model, load_format="dummy", block_size=size, max_model_len=longest))
        for size in args.sizes
    }
    for work in [*args.batches, 0]:
        found: dict[int, list[float]] = {size: [] for size in args.sizes}
        first = found[args.sizes[0]]
        for number in range(args.rounds):
            for size in turned(args.sizes, number):
                runner = runners[size]
                row = decode(runner, work, args.context, args.steps, 1.0) if work else prefill(runner, args.context)
                found[size].append(row["ms"])
        shown = "; ".join(
            f"{size}: {statistics.median(ms):.2f} ms, {ratio(zip(first, ms, strict=True))}"
            for size, ms in found.items()
        )
        print(f"{f'decode batch {work}' if work else f'prompt of {args.context} tokens'}: {shown}", flush=True)


if __name__ == "__main__":
    main()
