"""Compares weights of 16, 8 and 4 bits on this CPU (`python -m bench.quantization`).

The first part measures the speed of decode steps and of a prompt, for a model with Llama's architecture and 125M random
parameters. The variants alternate, one step at a time, so that other load on the machine affects all of them. The
second part measures the perplexity of the built-in model on stories that were not in its training data, in fp32. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from engine.model_runner import ModelRunner, RunnerSettings
from engine.rows import DecodeRows
from engine.sequence import Chunk
from engine.step_sampler import Sampler
from testing.engine import Batch
from testing.oracle import Oracle
from tools.storyteller.data import story_document

MODELS = Path(__file__).resolve().parents[1] / "models"
Quantization = Literal["int8", "int4"] | None
ARMS: dict[str, Quantization] = {"bfloat16": None, "int8": "int8", "int4": "int4"}
SEED = 20_261_123
"""The seed of the stories. Training and its held-out data used the seeds 1 to 4."""


class Decoding:
    """A batch of `num_seqs` sequences of `context` tokens, whose decode step `step` repeats and times."""

    def __init__(self, runner: ModelRunner, num_seqs: int, context: int) -> None:
        tokens = [token % runner.config.vocab_size for token in range(context)]
        self._runner, self.sequences = runner, Batch.of(runner, [tokens] * num_seqs, 1).sequences
        runner.bound_arena.zero_()  # KV is zero, because time does not depend on its values
        for sequence in self.sequences:
            sequence.num_computed = context - 1
        self._rows, self._sampler = DecodeRows(runner.layout.block_size), Sampler()
        self.seconds = list[float]()

    def step(self) -> None:
        start = time.perf_counter()
        logits = self._runner.step(self._rows.lay_out(self.sequences).batch)
        self._sampler.draw(logits, self.sequences)
        self.seconds.append(time.perf_counter() - start)


def decode_ms(
    runners: dict[str, ModelRunner], num_seqs: int, context: int, steps: int
) -> dict[str, tuple[float, float]]:
    """Returns the median and the shortest duration of a step in milliseconds, by variant. Other load on the machine
    affects the shortest duration less.
    """
    arms = {name: Decoding(runner, num_seqs, context) for name, runner in runners.items()}
    for _ in range(steps + 3):
        for arm in arms.values():
            arm.step()
    return {name: (statistics.median(arm.seconds[3:]) * 1e3, min(arm.seconds) * 1e3) for name, arm in arms.items()}


def prefill_ms(runners: dict[str, ModelRunner], num_tokens: int, times: int = 5) -> dict[str, float]:
    """Returns the median time to compute one prompt in one chunk, in milliseconds, by variant."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(times):
        for name, runner in runners.items():
            batch = Batch.of(runner, [[token % runner.config.vocab_size for token in range(num_tokens)]], 1)
            start = time.perf_counter()
            batch.step([Chunk(batch.sequences[0], num_tokens)])
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) * 1e3 for name, each in seconds.items()}


def perplexity(quantization: Quantization, num_stories: int) -> tuple[float, int]:
    """Returns the perplexity of the built-in model with these weights, and the number of predicted tokens."""
    runner = ModelRunner(
        RunnerSettings(MODELS / "storyteller", dtype="float32", device="cpu", quantization=quantization)
    )
    oracle, total, count = Oracle(runner), 0.0, 0
    for ids in stories(runner.max_model_len, num_stories):
        logprobs = oracle.logits(ids).log_softmax(-1)[:-1]
        total -= float(logprobs.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        count += len(ids) - 1
    return math.exp(total / count), count


def stories(max_len: int, number: int) -> Iterator[list[int]]:
    """Yields stories that were not in the built-in model's training data, as token ids, each truncated to `max_len`."""
    tokenizer, rng = Tokenizer.from_file(str(MODELS / "storyteller" / "tokenizer.json")), random.Random(SEED)
    for _ in range(number):
        yield tokenizer.encode(story_document(rng)).ids[:max_len]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantization", description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=MODELS / "configs" / "llama-125m", help="a config.json's directory"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stories", type=int, default=60)
    args = parser.parse_args()
    runners = {
        name: ModelRunner(RunnerSettings(args.model, load_format="dummy", device="cpu", quantization=quantization))
        for name, quantization in ARMS.items()
    }
    found: dict[str, Any] = {name: {"weights_mb": runner.weights_bytes / 1e6} for name, runner in runners.items()}
    for size in args.batches:
        for name, (median, least) in decode_ms(runners, size, args.context, args.steps).items():
            found[name][f"decode {size} ms"], found[name][f"decode {size} least"] = median, least
    for name, ms in prefill_ms(runners, args.context).items():
        found[name][f"prefill {args.context} ms"] = ms
    for name, quantization in ARMS.items():
        found[name]["perplexity"], num_tokens = perplexity(quantization, args.stories)
    report(found)
    print(f"perplexity over {num_tokens:,} tokens")
    about = {"bench": "quantization", "model": str(args.model), "numerics": runners["bfloat16"].numerics}
    print(json.dumps({**about, "cpu": platform.processor(), "tokens": num_tokens, "arms": found}))


def report(found: dict[str, Any]) -> None:
    """Prints one line per measurement: the value of every variant and, in parentheses, the first variant's value
    divided by it.
    """
    first = found[next(iter(found))]
    print(f"{'':16}" + "".join(f"{name:>22}" for name in found))
    for figure in first:
        cells = (f"{arm[figure]:.4g} ({first[figure] / arm[figure]:.2f}x)" for arm in found.values())
        print(f"{figure:16}" + "".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
