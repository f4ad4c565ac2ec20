"""Measures how a prompt that is computed delays running decodes: with whole prompts, with chunks, and with prefill and
decode in two processes (DistServe, Sarathi-Serve).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bench.paper.parts import Claim, Options, Section, table
from bench.served import peers_gap
from bench.served.itl import follow
from bench.served.peers_gap import Gaps
from bench.served.simulated import MODEL
from loadtest.svg import axis_of, lines
from looseleaf.client import AsyncClient
from looseleaf.llm import LLM

LIMIT_S = 150
PROMPTS, QUICK_PROMPTS = (256, 512, 1024), (256,)
STREAMS, ROUNDS = 4, 1
LIMIT_MS = 60.0
"""The limit of the arm `chunked` on the time between two tokens."""
ARMS: Mapping[str, Mapping[str, Any]] = {
    "whole": {"roles": "both", "max_itl": 0.0, "max_num_batched_tokens": 4096},
    "chunked": {"roles": "both", "max_itl": LIMIT_MS},
    "split": {"roles": "split", "threads": 1},
}
"""Settings of the services. The first two have one process with two threads, `split` two processes with one each."""


async def gaps(address: str, lengths: Sequence[int], rounds: int, most: int = 2000) -> list[dict[str, float]]:
    """Returns the medians over the rounds for each length of the long prompt. `most` is the number of tokens after
    which the decodes end; they must still run at the end of the measurement.
    """
    async with AsyncClient(address) as client:

        async def once(length: int, seed: int) -> Gaps:
            return await peers_gap.gaps(partial(follow, client), STREAMS, length, seed, most_tokens=most)

        await once(min(lengths), 0)  # warms up
        rows = []
        for length in lengths:
            found = [await once(length, seed) for seed in range(1, rounds + 1)]
            middle = {
                name: round(statistics.median(getattr(gap, name) for gap in found), 2)
                for name in ("usual_ms", "worst_ms", "ttft_ms")
            }
            rows.append({"prompt": length, **middle})
        return rows


def measure(options: Options) -> dict[str, Any]:
    lengths, rounds = (QUICK_PROMPTS, 1) if options.quick else (PROMPTS, ROUNDS)
    arms = {}
    for name, arm in ARMS.items():
        with LLM(str(MODEL), load_format="dummy", max_model_len=4096, num_blocks=4096, block_size=16, **arm) as llm:
            arms[name] = asyncio.run(gaps(llm.addresses.grpc, lengths, rounds))
    return {"rounds": rounds, "arms": arms}


def section(result: Mapping[str, Any]) -> Section:
    arms = result["arms"]
    longest = {name: rows[-1] for name, rows in arms.items()}
    length = longest["whole"]["prompt"]
    factor = {name: row["worst_ms"] / row["usual_ms"] for name, row in longest.items()}
    slower = longest["chunked"]["ttft_ms"] / longest["whole"]["ttft_ms"]
    claims = [
        Claim(
            f"a whole prompt stops running decodes ({length} tokens)", "Sarathi-Serve, figure 1; DistServe, figure 2",
            "stalls of several seconds, with large models",
            f"a gap of {longest['whole']['worst_ms']:.0f} ms, {factor['whole']:.0f} times the usual one",
            factor["whole"] > 5, "" if factor["whole"] > 5 else "the prompt is computed quickly beside a decode step",
        ),
        Claim(
            f"chunks bound the gap, at the price of a later first token ({length} tokens)", "Sarathi-Serve, section 4",
            "gaps within the limit",
            f"{longest['chunked']['worst_ms']:.0f} ms at a limit of {LIMIT_MS:g} ms; the first token takes "
            f"{slower:.2f} times as long",
            longest["chunked"]["worst_ms"] <= 1.25 * LIMIT_MS,
            "" if longest["chunked"]["worst_ms"] <= 1.25 * LIMIT_MS else "the limit is an aim: the time of a step is "
            "predicted from earlier steps, and attention to the prompt's earlier positions, the gateway and the client "
            "add to a gap on the same cores",
        ),
        Claim(
            f"with prefill and decode apart, a prompt does not delay decodes ({length} tokens)",
            "DistServe, section 3", "no interference",
            f"a gap of {longest['split']['worst_ms']:.0f} ms, {factor['split']:.1f} times the usual one",
            factor["split"] < 2,
            "" if factor["split"] < 2 else "both processes share two cores, their caches and the memory bandwidth with "
            "the gateway, Redis and the client",
        ),
    ]  # fmt: skip
    rows = [
        [name, row["prompt"], row["usual_ms"], row["worst_ms"], round(row["worst_ms"] / row["usual_ms"], 1),
         row["ttft_ms"]]
        for name, found in arms.items()
        for row in found
    ]  # fmt: skip
    described = (
        f"{STREAMS} requests decode with llama-125m (random weights) in real services when a long prompt arrives. The "
        "worst gap is the longest time between two tokens of any of them, from then until shortly after the prompt's "
        f"first token; values are medians of {result['rounds']} rounds. *whole*: one process with both roles and two "
        f"threads computes the prompt in one step. *chunked*: the same with `--max-itl {LIMIT_MS:g}`, so a decode step "
        "follows each chunk. *split*: one process prefills and one decodes, with one thread each, so decode steps are "
        "slower at all times.\n\n"
        + table(["arm", "prompt", "usual gap (ms)", "worst gap (ms)", "worst / usual", "TTFT of the prompt (ms)"], rows)
    )
    series = {name: [(row["prompt"], row["worst_ms"]) for row in found] for name, found in arms.items()}
    plot = lines(
        f"Longest gap of {STREAMS} decodes while a prompt is computed",
        axis_of("tokens of the prompt", [x for points in series.values() for x, _ in points], log=True),
        axis_of("ms", [y for points in series.values() for _, y in points], log=True),
        series,
    )
    return Section("Interference of prefill and decode", described, claims, {"interference.svg": plot})
