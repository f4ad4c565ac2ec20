"""Measures the time of a hand-over from prefill to decode by the length of the prompt (DistServe, section 6.3): on one
host, where a ticket names the blocks, and between two block stores, where the blocks are copied.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper.parts import Claim, Options, Section, table
from bench.served.simulated import MODEL
from common import convert
from common.group_need import blocks_of
from common.types import KvLayout
from engine.config import ModelConfig
from loadtest.svg import axis_of, lines
from looseleaf.client import AsyncClient
from looseleaf.llm import LLM
from looseleaf.simulation.report import quantile
from testing.ledger.hosts import Host
from testing.system import prompts

LIMIT_S = 120
LENGTHS, QUICK_LENGTHS = (16, 64, 256, 512, 1024, 2048), (16, 256)
ROUNDS, PULLS = 5, 5
OUTPUT_LEN = 32
PAPER_SHARE, PAPER_MS = 0.1, 30.0
"""DistServe's figures: percent of the total latency, and ms that 95 % of the requests do not exceed."""


async def on_one_host(address: str, lengths: Sequence[int], rounds: int) -> list[dict[str, float]]:
    """Serves single requests. Returns the medians of their phases by prompt length, and the 95th percentile of the
    hand-over, in ms.
    """
    rows = []
    async with AsyncClient(address) as client:
        for index, length in enumerate(lengths):
            found = []
            for number in range(rounds + 1):
                [prompt] = prompts(1, seed=100 * index + number, lengths=(length, length))
                began = time.perf_counter()
                done = await client.generate(prompt, max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)
                total_ms = 1e3 * (time.perf_counter() - began)
                times = done.timings
                found.append((times.hand_over_ns / 1e6, times.prefill_ns / 1e6, times.decode_ns / 1e6, total_ms))
            columns = list(zip(*found[1:], strict=True))  # the first one warms up
            names = ("hand_over_ms", "prefill_ms", "decode_ms", "total_ms")
            middle = {n: round(statistics.median(column), 3) for n, column in zip(names, columns, strict=True)}
            rows.append({"prompt": length, **middle, "hand_over_p95_ms": round(quantile(columns[0], 0.95), 3)})
    return rows


def between_hosts(layout: KvLayout, lengths: Sequence[int], pulls: int) -> list[dict[str, float]]:
    """Pulls the blocks of prompts from one block store to another, over loopback. Returns the medians in ms."""
    rows = []
    most = blocks_of(max(lengths), layout.block_size)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="looseleaf-paper-") as directory:
        a = Host(Path(directory) / "a", 2 * most + 16, layout=layout)
        b = Host(Path(directory) / "b", 2 * most + 16, "--pull-blocks", layout=layout)
        for length in lengths:
            times = []
            for number in range(pulls + 1):
                names = [hashlib.sha256(f"{length}/{number}/{block}".encode()).digest()
                         for block in range(blocks_of(length, layout.block_size))]  # fmt: skip
                blocks, _ = a.fill(names)
                ticket = a.hand_over([[blocks]])
                began = time.perf_counter()
                response = b.pull(a, ticket)
                times.append(1e3 * (time.perf_counter() - began))
                assert response.num_pulled == len(names)
                b.claim_and_release(convert.ticket_from_pb(response.ticket))
                a.end(ticket)
                a.assert_idle()
            num_bytes = blocks_of(length, layout.block_size) * layout.block_bytes
            rows.append({"prompt": length, "bytes": num_bytes, "pull_ms": round(statistics.median(times[1:]), 3)})
        a.stop()
        b.stop()
    return rows


def measure(options: Options) -> dict[str, Any]:
    lengths, rounds, pulls = (QUICK_LENGTHS, 1, 1) if options.quick else (LENGTHS, ROUNDS, PULLS)
    with LLM(str(MODEL), load_format="dummy", max_model_len=4096, num_blocks=4096, block_size=16, roles="split") as llm:
        rows = asyncio.run(on_one_host(llm.addresses.grpc, lengths, rounds))
    layout, _ = ModelConfig.from_directory(MODEL).kv_groups(16, "bfloat16")
    return {"rounds": rounds, "one_host": rows, "two_hosts": between_hosts(layout, lengths, pulls)}


def section(result: Mapping[str, Any]) -> Section:
    near, far = result["one_host"], result["two_hosts"]
    shares = [100 * row["hand_over_ms"] / row["total_ms"] for row in near]
    slowest = max(row["hand_over_p95_ms"] for row in near)
    growth = near[-1]["hand_over_ms"] / near[0]["hand_over_ms"]
    below = next((row["prompt"] for row, share in zip(near, shares, strict=True) if share < PAPER_SHARE), None)
    small = f"the requests are short: {near[0]['total_ms']:.0f} to {near[-1]['total_ms']:.0f} ms"
    small += "" if below is None else f". From {below} prompt tokens on, the share is lower than the paper's"
    claims = [
        Claim("the hand-over is a tiny part of a request's time", "DistServe, section 6.3", f"< {PAPER_SHARE:g} %",
              f"{min(shares):.2f} to {max(shares):.2f} %", max(shares) < PAPER_SHARE,
              "" if max(shares) < PAPER_SHARE else small),
        Claim("95 % of the hand-overs are short", "DistServe, section 6.3", f"< {PAPER_MS:g} ms",
              f"< {slowest:.1f} ms on one host", slowest < PAPER_MS,
              "on one host, no KV is copied" if slowest < PAPER_MS else "other work on the two cores"),
        Claim("the time of a hand-over grows with the prompt when its KV is copied", "DistServe, section 3.3",
              "bytes over bandwidth",
              f"{far[-1]['pull_ms'] / far[0]['pull_ms']:.1f} times for {far[-1]['bytes'] / far[0]['bytes']:.0f} times "
              f"the bytes; on one host {growth:.1f} times", far[-1]["pull_ms"] > 2 * far[0]["pull_ms"],
              "with a fixed time for calls and the ledger" if far[-1]["pull_ms"] > 2 * far[0]["pull_ms"] else
              "the fixed time for calls and the ledger dominates at these lengths"),
    ]  # fmt: skip
    rows = [
        [a["prompt"], a["hand_over_ms"], a["hand_over_p95_ms"], f"{share:.2f} %", a["prefill_ms"], a["total_ms"],
         f"{b['bytes'] / 1e6:.1f}", b["pull_ms"]]
        for a, b, share in zip(near, far, shares, strict=True)
    ]  # fmt: skip
    header = ["prompt", "hand-over (ms)", "p95 (ms)", "of the total", "prefill (ms)", "total (ms)", "KV (MB)",
              "pull from another store (ms)"]  # fmt: skip
    described = (
        f"Single requests with {OUTPUT_LEN} output tokens on idle services with llama-125m (random weights), one "
        "process for prefill and one for decode, which take turns. The hand-over is the time from the first token "
        "until decode has claimed the ticket, as the reply reports it. The ticket names blocks of a shared arena, so "
        f"no KV is copied. Values are medians of {result['rounds']} requests. The last column is the time to pull "
        "the same number of bytes between two block stores with a ledger each, over this machine's loopback, one "
        "prompt at a time and after its prefill; a gateway pulls most blocks earlier, while the prompt is computed.\n\n"
        + table(header, rows)
    )
    series = {
        "on one host": [(row["prompt"], row["hand_over_ms"]) for row in near],
        "pull between stores": [(row["prompt"], row["pull_ms"]) for row in far],
    }
    plot = lines(
        "Time of a hand-over by prompt length",
        axis_of("tokens of the prompt", [row["prompt"] for row in near], log=True),
        axis_of("ms", [y for points in series.values() for _, y in points], zero=True),
        series,
    )
    return Section("Time of a hand-over", described, claims, {"hand_over.svg": plot})
