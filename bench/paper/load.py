"""Measures throughput against the number of requests at once, and latency against the rate of requests until it
doubles (PagedAttention, figure 12), with real services.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bench.paper.arrivals import poisson
from bench.paper.parts import Claim, Options, Section, table
from bench.served.simulated import MODEL
from engine.config import ModelConfig
from loadtest.svg import axis_of, lines
from looseleaf.client import AsyncClient
from looseleaf.llm import LLM
from looseleaf.simulation import replay
from looseleaf.simulation.outcome import Outcome
from looseleaf.simulation.report import Summary, quantile
from looseleaf.simulation.trace import TraceRequest
from testing.system import prompts

LIMIT_S = 180
BATCHES, QUICK_BATCHES = (1, 2, 4, 8, 16, 32, 64), (1, 4)
PROMPT_LEN, BATCH_OUTPUT = 32, 96
RATES, SECONDS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0), 12.0
QUICK_RATES, QUICK_SECONDS = (1.0, 3.0), 2.0
PROMPT, OUTPUT = (32, 96), (32, 96)
"""The ranges of lengths of the requests that arrive at a rate."""
DOUBLED = 2.0
FLAT = 1.25
"""A higher rate is beyond the knee if the latency has grown by this factor."""


async def together(client: AsyncClient, num: int, num_tokens: int, seed: int) -> list[list[float]]:
    """Sends `num` requests at once. Returns the times at which each request's tokens arrived."""
    stamps: list[list[float]] = [[] for _ in range(num)]

    async def send(prompt: Sequence[int], seen: list[float]) -> None:
        stream = client.stream(list(prompt), max_tokens=num_tokens + num, temperature=0.0, ignore_eos=True)
        async for delta in stream:
            seen += [time.perf_counter()] * len(delta.token_ids)

    drawn = prompts(num, seed=seed, lengths=(PROMPT_LEN, PROMPT_LEN))
    await asyncio.gather(*(send(prompt, seen) for prompt, seen in zip(drawn, stamps, strict=True)))
    return stamps


def row_of(stamps: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns the tokens per second of all requests while all decode, and the mean time in ms between two tokens of a
    request. Raises ValueError if there is no time at which all decode.
    """
    num, begin, end = len(stamps), max(seen[1] for seen in stamps), min(seen[-1] for seen in stamps)
    counted = sum(begin < at <= end for seen in stamps for at in seen)
    if not counted:
        raise ValueError(f"the {num} requests did not decode at the same time; ask for more tokens")
    return {"batch": num, "tokens_per_s": round(counted / (end - begin), 1),
            "itl_ms": round(1e3 * (end - begin) * num / counted, 3)}  # fmt: skip


def trace(rate: float, seconds: float) -> list[TraceRequest]:
    """Returns requests with Poisson arrivals."""
    return poisson(f"load/{rate}", rate, seconds, PROMPT, OUTPUT, least=2)


def normalised_s(outcome: Outcome) -> float:
    """Returns the time from a request's arrival until its last token, per token (the paper's normalised latency)."""
    return (outcome.token_times[-1] - outcome.arrived_s) / len(outcome.token_times)


def point_of(rate: float, outcomes: Sequence[Outcome]) -> dict[str, float]:
    served = [outcome for outcome in outcomes if not outcome.refusal]
    summary = Summary.of(outcomes)
    return {
        "rate": rate, "requests": len(outcomes), "refused": summary.num_refused,
        "tokens_per_s": round(summary.tokens_per_s, 1),
        "latency_ms": round(1e3 * statistics.fmean(map(normalised_s, served)), 2),
        "ttft_p50_ms": round(1e3 * summary.ttft_p50, 1),
        "ttft_p90_ms": round(1e3 * quantile([outcome.ttft_s for outcome in served], 0.9), 1),
    }  # fmt: skip


async def batch_rows(address: str, sizes: Sequence[int], num_tokens: int = BATCH_OUTPUT) -> list[dict[str, float]]:
    async with AsyncClient(address) as client:
        await together(client, 4, 8, -1)  # warms up
        return [row_of(await together(client, size, num_tokens, size)) for size in sizes]


def measure(options: Options) -> dict[str, Any]:
    sizes = QUICK_BATCHES if options.quick else BATCHES
    rates, seconds = (QUICK_RATES, QUICK_SECONDS) if options.quick else (RATES, SECONDS)
    vocab_size, points = ModelConfig.from_directory(MODEL).vocab_size, list[dict[str, float]]()
    with LLM(str(MODEL), load_format="dummy", max_model_len=1024, num_blocks=4096) as llm:
        by_batch = asyncio.run(batch_rows(llm.addresses.grpc, sizes))
        for seed, rate in enumerate(rates):
            outcomes = asyncio.run(replay.replay(llm.addresses.grpc, trace(rate, seconds), vocab_size, seed))
            points.append(point_of(rate, outcomes))
            if points[-1]["latency_ms"] > DOUBLED * points[0]["latency_ms"]:
                break
    return {"seconds": seconds, "batches": by_batch, "rates": points}


def crossing(points: Sequence[Mapping[str, float]], factor: float) -> float | None:
    """Returns the rate at which the latency is `factor` times that of the first rate, by linear interpolation, or None
    if it is not reached.
    """
    limit = factor * points[0]["latency_ms"]
    for before, after in pairwise(points):
        if after["latency_ms"] > limit:
            part = (limit - before["latency_ms"]) / (after["latency_ms"] - before["latency_ms"])
            return before["rate"] + max(0.0, part) * (after["rate"] - before["rate"])
    return None


def section(result: Mapping[str, Any]) -> Section:
    batches, points = result["batches"], result["rates"]
    first, last = batches[0], batches[-1]
    gain = last["tokens_per_s"] / first["tokens_per_s"]
    steps = [b["tokens_per_s"] / a["tokens_per_s"] for a, b in pairwise(batches)]
    flat, doubled = crossing(points, FLAT), crossing(points, DOUBLED)
    is_knee = flat is not None and doubled is not None and len(points) > 3 and doubled < 2 * flat
    claims = [
        Claim(
            "throughput grows with the batch, because the weights are read once for all sequences",
            "PagedAttention, section 1", "grows", f"{gain:.1f} times at {last['batch']}", gain > 2,
            "" if gain > 2 else "on this CPU, a step computes rather than waits for memory",
        ),
        Claim(
            "each doubling of the batch gains less than the one before", "Orca, figure 10; the roofline model", "yes",
            ", ".join(f"{step:.2f}" for step in steps), steps[-1] < steps[0],
            "" if steps[-1] < steps[0] else "the gain of the last doubling is not smaller than that of the first",
        ),
        Claim(
            "the latency per token is nearly flat up to a rate, and then grows fast", "PagedAttention, figure 12",
            "a knee",
            "not doubled" if doubled is None or flat is None else
            f"{FLAT:g} times at {flat:.1f} requests/s, {DOUBLED:g} times at {doubled:.1f}",
            is_knee,
            "" if is_knee else "the time of a step grows with its batch on this CPU, so the latency grows from the "
            "first rates on",
        ),
    ]  # fmt: skip
    most = max(points, key=lambda point: point["tokens_per_s"])
    end = (
        f"It doubles at about {doubled:.1f} requests a second."
        if doubled is not None
        else f"It has not doubled at {points[-1]['rate']:g} requests a second."
    )
    described = (
        "Real services with llama-125m (random weights), started as `looseleaf serve` does on this machine. First, "
        f"batches of requests with prompts of {PROMPT_LEN} tokens are sent at once; the table counts tokens while all "
        "requests of a batch decode.\n\n"
        + table(
            ["requests at once", "tokens/s", "over one", "ms between tokens"],
            [[row["batch"], row["tokens_per_s"], f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}", row["itl_ms"]]
             for row in batches],
        )
        + f"\n\nThen requests arrive at random (Poisson) for {result['seconds']:g} s at each rate, with prompts and "
        f"outputs of {OUTPUT[0]} to {OUTPUT[1]} tokens. The latency is the paper's normalised latency: the time from a "
        "request's arrival until its last token, per token, as the mean over the requests. The rates rise until it is "
        f"more than {DOUBLED:g} times that of the first rate. {end} The highest throughput is "
        f"{most['tokens_per_s']:.0f} tokens/s at {most['rate']:g} requests a second.\n\n"
        + table(
            ["requests/s", "latency (ms per token)", "tokens/s", "TTFT p50 (ms)", "TTFT p90 (ms)", "refused"],
            [[point["rate"], point["latency_ms"], point["tokens_per_s"], point["ttft_p50_ms"], point["ttft_p90_ms"],
              point["refused"]] for point in points],
        )
    )  # fmt: skip
    plots = {
        "load_batch.svg": lines(
            "Throughput by the number of requests at once",
            axis_of("requests at once", [row["batch"] for row in batches], log=True),
            axis_of("tokens/s", [row["tokens_per_s"] for row in batches], zero=True),
            {"tokens/s": [(row["batch"], row["tokens_per_s"]) for row in batches]},
        ),
        "load_rate.svg": lines(
            "Latency per token by the rate of requests",
            axis_of("requests/s", [point["rate"] for point in points], zero=True),
            axis_of("ms per token", [point["latency_ms"] for point in points], zero=True),
            {"mean latency per token": [(point["rate"], point["latency_ms"]) for point in points]},
        ),
    }
    return Section("Throughput and latency under load", described, claims, plots)
