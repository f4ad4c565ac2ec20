"""Measures what is gained by copying a prompt's blocks to the decode worker's host while prefill computes later blocks
(`python -m bench.hosts_overlap`).

Runs two hosts in network namespaces on this machine (needs root), with prefill and the gateway on one host and decode
on the other. `tc` limits the rate of the link between them. The model is random, and its prompts differ, so nothing is
cached. The first token is sent before the blocks travel, so the gain is in the time to the second token. In each round,
the same requests go through a gateway with early pulls and through one without, in changing order. Under load, requests
arrive at random times, whatever the number that are running. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.tiny import make_checkpoint
from looseleaf.client import AsyncClient
from testing.two_hosts import TwoHosts

MODEL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
"""A model of 25 million parameters, whose keys and values take 16 KiB per token."""
MAX_TOKENS = 8
NUM_BLOCKS = 1536
WARM_UP = (64, 512, 1024, 2048)
"""Lengths of the prompts from which a new gateway learns how long copies take."""


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a request, in seconds after it was sent."""

    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of measurement."""

    num_tokens: int
    load: float
    """The rate at which requests arrive, as a fraction of the rate at which prefill can compute them. 0: each request
    is sent after the one before it has ended.
    """


async def ask(client: AsyncClient, num_tokens: int) -> Times:
    """Sends a request with a random prompt, and returns its times."""
    prompt = [random.randrange(10, 256) for _ in range(num_tokens)]
    began, at = time.perf_counter(), list[float]()
    async for delta in client.stream(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0, timeout=600):
        at += [time.perf_counter() - began] * len(delta.token_ids)
    return Times(at[0], at[1])


async def measure(address: str, case: Case, pauses_s: list[float]) -> list[Times]:
    """Sends a request after each pause. Without load, also waits for the end of each request."""
    async with AsyncClient(address) as client:
        if not case.load:
            return [await ask(client, case.num_tokens) for _ in pauses_s]
        asked = []
        for pause_s in pauses_s:
            await asyncio.sleep(pause_s)
            asked.append(asyncio.create_task(ask(client, case.num_tokens)))
        return list(await asyncio.gather(*asked))


async def warm_up(address: str) -> None:
    async with AsyncClient(address) as client:
        for num_tokens in WARM_UP:
            await ask(client, num_tokens)


def p50_ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 1)


def compare(hosts: TwoHosts, cases: list[Case], rounds: int, num_requests: int) -> list[dict[str, Any]]:
    """Returns a row for each case, with medians in milliseconds with and without early pulls."""
    found: dict[tuple[Case, bool], list[Times]] = defaultdict(list)
    early_tokens: dict[Case, float] = defaultdict(float)
    prefill_s: dict[int, float] = {}
    """The time to the first token of a request that is alone, by length of the prompt."""
    for number in range(rounds):
        for is_early in (False, True) if number % 2 == 0 else (True, False):
            hosts.restart_gateway({} if is_early else {"early_pull_tokens": 0})
            asyncio.run(warm_up(hosts.grpc))
            for case in cases:
                rng, mean_s = random.Random(number), prefill_s.get(case.num_tokens, 0.0) / (case.load or 1.0)
                pauses_s = [rng.expovariate(1.0 / mean_s) if case.load else 0.0 for _ in range(num_requests)]
                before = hosts.metric("looseleaf_early_pulled_tokens_total")
                times = asyncio.run(measure(hosts.grpc, case, pauses_s))
                early_tokens[case] += hosts.metric("looseleaf_early_pulled_tokens_total") - before
                if not case.load:
                    prefill_s.setdefault(case.num_tokens, statistics.median(each.first for each in times))
                found[case, is_early] += times
    rows = []
    for case in cases:
        off, on = found[case, False], found[case, True]
        rows.append(
            {
                "prompt_tokens": case.num_tokens, "load": case.load,
                "first_token_ms": (p50_ms([t.first for t in off]), p50_ms([t.first for t in on])),
                "second_token_ms": (p50_ms([t.second for t in off]), p50_ms([t.second for t in on])),
                "gap_ms": (p50_ms([t.second - t.first for t in off]), p50_ms([t.second - t.first for t in on])),
                "early_share": round(early_tokens[case] / (len(on) * case.num_tokens), 2),
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hosts_overlap", description=__doc__)
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000, 250], help="rates of the link; 0: no limit")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4096], help="lengths of prompts")
    parser.add_argument("--load", type=float, default=0.6, help="rate of arrivals, as a fraction of prefill's capacity")
    parser.add_argument("--requests", type=int, default=8, help="requests of each case in a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cases = [Case(tokens, load) for load in (0.0, args.load) for tokens in args.tokens]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ll-overlap-") as directory:
        model = make_checkpoint(Path(directory), "llama", std=0.02, dtype=torch.bfloat16, **MODEL)
        with TwoHosts(model, namespaces=True, num_blocks=NUM_BLOCKS, max_model_len=max(args.tokens) + 64) as hosts:
            for mbit in args.mbit:
                hosts.limit_link(mbit)
                found[str(mbit)] = compare(hosts, cases, args.rounds, args.requests)
                print(f"link of {mbit} Mbit/s" if mbit else "link without a limit")
                for row in found[str(mbit)]:
                    print(f"  {row}", flush=True)
    print(json.dumps({"bench": "hosts_overlap", "requests": args.requests * args.rounds, "links": found}))


if __name__ == "__main__":
    main()
