"""Measures the share of KV memory that contains tokens, with contiguous reservation and with paging (PagedAttention,
figures 2 and 13), and the unused slots by block size.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from bench.paper.memory_arms import ARMS, Lens, Paged, simulate
from bench.paper.parts import Claim, Options, Section, table
from bench.served.sharing import SIGMA
from loadtest.svg import Axis, axis_of, bars, lines
from loadtest.workload import Lengths
from looseleaf.simulation.trace import read_lengths

LIMIT_S = 40
NUM_SLOTS, MAX_LEN = 15_700, 2048
"""The number of KV slots, and the length of the longest sequence, for OPT-13B on a GPU of 40 GB (the paper's table 1).
"""
BLOCK_SIZES = (4, 8, 16, 32, 64, 128, 256)
PAPER = {"Orca (Max)": 20.4, "Orca (Pow2)": 26.8, "Orca (Oracle)": 38.2, "paged, 16": 96.3}
PAPER_BATCH = {"Orca (Max)": 7.0, "Orca (Pow2)": 9.81, "Orca (Oracle)": 13.62, "paged, 16": 30.42}
ROOM = 0.25
"""The relative difference from the paper's share up to which a share counts as reproduced."""


def lengths(options: Options, num: int) -> list[Lens]:
    """Returns the lengths of `num` requests, from the trace or drawn. The sum of a request's two lengths is limited to
    MAX_LEN - 1, and its prompt to half of MAX_LEN.
    """
    if options.trace is not None:
        pairs = read_lengths(options.trace)
        found = [pairs[number % len(pairs)] for number in range(num)]
    else:
        rng = random.Random(0)
        prompt, output = Lengths.of_mean(161.31, SIGMA, 1024), Lengths.of_mean(337.99, SIGMA, 1023)
        found = [(prompt.draw(rng), output.draw(rng)) for _ in range(num)]
    short = [(min(prompt, MAX_LEN // 2), output) for prompt, output in found]
    return [(prompt, min(output, MAX_LEN - prompt - 1)) for prompt, output in short]


def measure(options: Options) -> dict[str, Any]:
    requests = lengths(options, 120 if options.quick else 600)
    arms = {name: simulate(make(NUM_SLOTS, MAX_LEN), requests).row(NUM_SLOTS) for name, make in ARMS.items()}
    sizes = [{"block_size": size, **_waste(size, requests)} for size in BLOCK_SIZES]
    return {
        "lengths": "drawn" if options.trace is None else options.trace.name,
        "requests": len(requests),
        "mean_prompt": round(sum(prompt for prompt, _ in requests) / len(requests), 1),
        "mean_output": round(sum(output for _, output in requests) / len(requests), 1),
        "arms": arms,
        "block_sizes": sizes,
    }


def _waste(size: int, requests: Sequence[Lens]) -> dict[str, float]:
    """Returns the unused share of allocated slots in percent, both as counted ("unused") and as estimated with
    (block_size + 1) / 2 unused slots per sequence ("model"). Also returns the share of all slots that contain tokens,
    in percent, the mean number of running requests, and the number of preemptions.
    """
    shares = simulate(Paged(NUM_SLOTS, size), requests)
    lost = (size + 1) / 2 * shares.running
    return {
        "unused": round(100 * (1 - shares.tokens / shares.allocated), 2),
        "model": round(100 * lost / (lost + shares.tokens), 2),
        "tokens": round(100 * shares.tokens / (shares.steps * NUM_SLOTS), 1),
        "running": round(shares.running / shares.steps, 2),
        "preempted": shares.preempted,
    }


def section(result: Mapping[str, Any]) -> Section:
    arms, sizes = result["arms"], result["block_sizes"]
    rows = [
        [name, f"{row['tokens']} %", f"{PAPER[name]} %", f"{row['reserved']} %", f"{row['rounded']} %",
         f"{row['free']} %", row["running"], PAPER_BATCH[name]]
        for name, row in arms.items()
    ]  # fmt: skip
    by_size = [
        [row["block_size"], f"{row['unused']} %", f"{row['model']} %", f"{row['tokens']} %", row["running"]]
        for row in sizes
    ]
    kind = (
        "drawn from lognormal distributions with the mean lengths of ShareGPT (161.31 and 337.99 tokens, sigma "
        f"{SIGMA}, outputs of at most 1,023 tokens)"
        if result["lengths"] == "drawn"
        else f"those of {result['lengths']}"
    )
    header = ["arm", "tokens", "paper", "reserved, no token", "rounding", "free", "running", "paper, at 2 requests/s"]
    described = (
        "The real decode scheduler runs the requests over simulated memory of the paper's size for OPT-13B: "
        f"{NUM_SLOTS:,} slots, and sequences of at most {MAX_LEN:,} tokens. Lengths are {kind}; the means of the "
        f"{result['requests']} requests are {result['mean_prompt']} and {result['mean_output']} tokens. All requests "
        "wait from the beginning. Contiguous arms reserve memory with a buddy allocator when a request starts. Shares "
        "are means over all steps after the first fifth of the requests, as long as requests are waiting. No model "
        "runs. `make bench-waste` measures the paged arm with real services: see "
        "[sequence groups](../benchmarks/sequence-groups/README.md).\n\n" + table(header, rows) + "\n\n"
        "The paper's numbers of running requests were measured at 2 requests a second, and ours with a full queue, so "
        "they differ by design for all arms except Max, which is limited by memory in both.\n\n"
        "The next table shows the paged arm at other block sizes. The model says that a sequence has (block size + 1) "
        "/ 2 unused slots on average, because each step first makes room for the next token.\n\n"
        + table(["block size", "unused slots in blocks", "model", "tokens", "running"], by_size)
    )
    names = list(arms)
    parts = {"tokens": "tokens", "reserved": "reserved, no token", "rounded": "rounding", "free": "free"}
    plots = {
        "memory.svg": bars(
            "Share of KV memory by use", Axis("% of all slots", 0, 100), names,
            {label: [arms[name][key] for name in names] for key, label in parts.items()},
        ),
        "block_sizes.svg": lines(
            "Unused slots in allocated blocks", axis_of("block size", BLOCK_SIZES, log=True),
            axis_of("% of allocated slots", [row["unused"] for row in sizes], zero=True),
            {key: [(row["block_size"], row[key]) for row in sizes] for key in ("unused", "model")},
        ),
    }  # fmt: skip
    return Section("Shares of KV memory", described, _claims(arms), plots)


def _claims(arms: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    why = "lengths are drawn, the queue is full, and the allocator only resembles the paper's, which is not published"
    claims = []
    for name, theirs in PAPER.items():
        ours = arms[name]["tokens"]
        holds = abs(ours - theirs) <= ROOM * theirs
        text = f"share of KV memory that contains tokens, {name}"
        claims.append(Claim(text, "PagedAttention, figure 2", f"{theirs} %", f"{ours} %", holds, "" if holds else why))
    batch = arms["Orca (Max)"]["running"]
    claims.append(Claim(
        "requests that run at once with Orca (Max)", "PagedAttention, figure 13", "7.00", f"{batch:.2f}",
        abs(batch - 7) < 0.1, "" if abs(batch - 7) < 0.1 else why,
    ))  # fmt: skip
    return claims
