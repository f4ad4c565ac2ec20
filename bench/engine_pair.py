"""Measures decode steps and a prompt with the engines of two checkouts in turn.

    python -m bench.engine_pair --other ../before --rounds 13

Both engines are loaded all the time, each with the code of its checkout. They compute in turn (`bench.engine`), so
other load on the machine affects both. Prints the medians of each, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from bench.checkout import Checkout
from bench.engine import MODEL
from bench.rounds import ratio
from common.errors import StartupError

DRIVER = """
import sys
from bench.engine import ModelRunner, RunnerSettings, decode, prefill
model, context, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
runner = ModelRunner(RunnerSettings(model=model, load_format="dummy"))
print("ready", flush=True)
for line in sys.stdin:
    size = int(line)
    found = decode(runner, size, context, steps, 1.0) if size else prefill(runner, context)
    print("found", found["ms"], flush=True)
"""
"""A program that runs in each checkout. It reads batch sizes, 0 for a prompt, and prints milliseconds."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_pair", description=__doc__)
    parser.add_argument("--other", type=Path, required=True, help="directory of the other checkout, with built kernels")
    parser.add_argument("--model", default=str(MODEL), help="directory with a config.json; its weights are random")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16, 32], help="batch sizes of decode steps")
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence, and of the prompt")
    parser.add_argument("--steps", type=int, default=20, help="steps of a measurement, whose median counts")
    parser.add_argument("--rounds", type=int, default=13, help="measurements of each")
    args = parser.parse_args()
    works = [*args.batches, 0]
    found: dict[int, list[tuple[float, float]]] = {work: [] for work in works}
    arguments = [str(Path(args.model).resolve()), str(args.context), str(args.steps)]
    with Checkout(args.other, DRIVER, arguments) as other, Checkout(Path.cwd(), DRIVER, arguments) as this:
        for number in range(args.rounds):
            for work in works:
                if number % 2:
                    before, after = other.ask(str(work)), this.ask(str(work))
                else:
                    after, before = this.ask(str(work)), other.ask(str(work))
                found[work].append((float(before[0]), float(after[0])))
    for work, rounds in found.items():
        before_ms, after_ms = map(statistics.median, zip(*rounds, strict=True))
        print(
            f"{f'decode batch {work}' if work else f'prompt of {args.context} tokens'}: other {before_ms:.2f} ms, "
            f"this {after_ms:.2f}, {ratio(rounds)}"
        )


if __name__ == "__main__":
    try:
        main()
    except StartupError as error:
        print(f"bench.engine_pair: {error}", file=sys.stderr)
        sys.exit(1)
