"""Generates the same tokens with a KV cache and without one, and fits how the time grows with the length.

The arm without a cache computes the keys and values of all earlier tokens again for each new token. Both arms run the
real engine, with one sequence, and must generate the same tokens.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.engine import MODEL
from bench.paper.parts import Claim, Options, Section, table
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Chunk
from loadtest.svg import axis_of, lines
from testing.engine import Batch

LIMIT_S = 120
PROMPT_LEN = 8
LENGTHS, QUICK_LENGTHS = (24, 32, 48, 64, 96, 128), (16, 32, 64)
"""The numbers of generated tokens at which the total time is noted."""
NEAR = 8
"""The time of a token is the median over this many tokens."""
ARMS = ("with a cache", "without a cache")


def token_times(runner: ModelRunner, num_tokens: int, *, cached: bool) -> tuple[list[float], list[int]]:
    """Generates `num_tokens` tokens. Returns the duration of each step in seconds, and the tokens. The first step
    computes the prompt.
    """
    prompt = [5 + 7 * token for token in range(PROMPT_LEN)]
    batch = Batch.of(runner, [prompt], num_tokens, budget=PROMPT_LEN + num_tokens)
    [sequence] = batch.sequences
    seconds = []
    for _ in range(num_tokens):
        sequence.num_computed = sequence.num_computed if cached else 0
        began = time.perf_counter()
        batch.step([Chunk(sequence, sequence.num_tokens - sequence.num_computed)])
        seconds.append(time.perf_counter() - began)
    return seconds, sequence.output_ids


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Returns b of the power law y = a * x**b that fits the points best by least squares of the logarithms."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    return statistics.linear_regression(xs, ys).slope


def measure(options: Options) -> dict[str, Any]:
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    runner = ModelRunner(RunnerSettings(str(MODEL), load_format="dummy", max_model_len=PROMPT_LEN + max(lengths)))
    token_times(runner, NEAR, cached=False)  # warms up
    times, tokens = {}, {}
    for name in ARMS:
        times[name], tokens[name] = token_times(runner, max(lengths), cached=name == ARMS[0])
    assert tokens[ARMS[0]] == tokens[ARMS[1]], "the arms generated different tokens"
    return {
        "threads": runner.num_threads,
        "rows": [
            {
                "tokens": length,
                **{name: {
                    "token_ms": round(1e3 * statistics.median(seconds[length - NEAR : length]), 3),
                    "total_s": round(sum(seconds[:length]), 4),
                } for name, seconds in times.items()},
            }
            for length in lengths
        ],
    }  # fmt: skip


def section(result: Mapping[str, Any]) -> Section:
    rows = result["rows"]
    fitted = {
        (name, what): exponent([(row["tokens"], row[name][what]) for row in rows])
        for name in ARMS
        for what in ("token_ms", "total_s")
    }
    last = rows[-1]
    ratio = last[ARMS[1]]["total_s"] / last[ARMS[0]]["total_s"]
    claims = [
        _claim("the time of a token grows with its position without a cache", "linear or faster",
               fitted[ARMS[1], "token_ms"], (0.8, 2.1)),
        _claim("the time of a text grows with its length without a cache", "quadratic or faster",
               fitted[ARMS[1], "total_s"], (1.8, 3.1)),
        _claim("the time of a text grows with its length with a cache", "linear, while weights dominate",
               fitted[ARMS[0], "total_s"], (0.8, 1.2)),
    ]  # fmt: skip
    described = (
        f"llama-125m (random weights, {result['threads']} threads) generates {last['tokens']} tokens after a prompt of "
        f"{PROMPT_LEN}, one sequence at a time, once with its KV cache and once with all keys and values computed "
        "again for each token. Both arms run the same engine and must generate the same tokens, otherwise the "
        f"measurement fails. The time of a token is the median of {NEAR}. For {last['tokens']} tokens, the cache makes "
        f"generation {ratio:.1f} times faster. Attention is a small part of a step at these lengths; where it "
        "dominates, the exponents of a text approach 2 with a cache and 3 without one.\n\n"
        + table(
            ["tokens", *(f"{name}: {what}" for name in ARMS for what in ("ms per token", "total (s)"))],
            [
                *([row["tokens"], *(row[name][what] for name, what in fitted)] for row in rows),
                ["fitted exponent", *(f"{found:.2f}" for found in fitted.values())],
            ],
        )
    )
    series = {name: [(row["tokens"], row[name]["total_s"]) for row in rows] for name in ARMS}
    plot = lines(
        "Time to generate a text, with and without a KV cache",
        axis_of("tokens", [row["tokens"] for row in rows], log=True),
        axis_of("seconds", [value for points in series.values() for _, value in points], log=True),
        series,
    )
    return Section("Decoding without a KV cache", described, claims, {"no_cache.svg": plot})


def _claim(text: str, theirs: str, found: float, span: tuple[float, float]) -> Claim:
    holds = span[0] <= found <= span[1]
    why = "" if holds else "the fixed time of a step, or other work on the machine, hides the growth at these lengths"
    return Claim(text, "the cost of attention, from its definition", theirs, f"exponent {found:.2f}", holds, why)
