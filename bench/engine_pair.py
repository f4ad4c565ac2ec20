"""Measures decode steps and a prompt with the engines of two checkouts in turn.

    python -m bench.engine_pair --other ../before --rounds 13

Both engines are loaded all the time, each with the code of its checkout. They compute in turn (`bench.engine`), so
other load on the machine affects both. Prints the medians of each, and the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench.engine import MODEL

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


class Checkout:
    """A process that has loaded the engine of one directory."""

    def __init__(self, directory: Path, args: argparse.Namespace) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(Path(args.model).resolve()), str(args.context), str(args.steps)],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(directory.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._read("ready")

    def measure(self, batch: int) -> float:
        """Returns the milliseconds of a step with `batch` sequences, or of a prompt if `batch` is 0."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        return float(self._read("found")[0])

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60.0)

    def _read(self, word: str) -> list[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, *rest = line.split()
            if first == word:
                return rest
        sys.exit(f"bench.engine_pair: the engine in {self._process.args!r} has ended")


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
    other, this = Checkout(args.other, args), Checkout(Path.cwd(), args)
    for number in range(args.rounds):
        for work in works:
            if number % 2:
                before, after = other.measure(work), this.measure(work)
            else:
                after, before = this.measure(work), other.measure(work)
            found[work].append((before, after))
    for work, rounds in found.items():
        before, after = map(statistics.median, zip(*rounds, strict=True))
        ratios = sorted(new / old for old, new in rounds)
        print(
            f"{f'decode batch {work}' if work else f'prompt of {args.context} tokens'}: other {before:.2f} ms, "
            f"this {after:.2f}, ratio {statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    other.close()
    this.close()


if __name__ == "__main__":
    main()
