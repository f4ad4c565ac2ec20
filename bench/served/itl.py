"""Measures the longest gap between two tokens of running decodes while a long prompt is computed, and the time to first
token of that prompt, with and without a limit on the gap (`python -m bench.served.itl`).

Every round starts each arrangement with each limit, one after another. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

from pydantic import Field

from bench.served import peers_gap
from bench.served.machine import provenance
from bench.served.peers_gap import Gaps
from common.settings import Settings, settings_config
from looseleaf.client import AsyncClient
from looseleaf.llm import serve_settings
from looseleaf.serve.launcher import Launcher

Roles = Literal["both", "split"]


class ItlSettings(Settings):
    """The settings of the measurement."""

    model_config = settings_config("LOOSELEAF_ITL_", "bench.served.itl")

    model: str = Field("models/configs/llama-125m", description="Hugging Face model directory")
    load_format: Literal["auto", "dummy"] = "dummy"
    roles: list[Roles] = Field(["both", "split"])
    max_itl: list[float | None] = Field(
        [0.0, None], description="limits in ms; 0: none; null: the default. The first is the reference"
    )
    max_num_batched_tokens: int = Field(512, ge=1, description="maximum number of tokens in a step")
    streams: int = Field(16, ge=1, le=64)
    prompt_len: int = Field(4095, ge=1, description="tokens of the long prompt")
    rounds: int = Field(3, ge=1)


async def follow(client: AsyncClient, prompt: Sequence[int], max_tokens: int, stamps: list[float]) -> None:
    async for delta in client.stream(list(prompt), max_tokens=max_tokens, temperature=0.0, ignore_eos=True):
        if delta.token_ids:
            stamps.append(time.perf_counter())


async def gaps(address: str, settings: ItlSettings, seed: int) -> Gaps:
    async with AsyncClient(address) as client:
        return await peers_gap.gaps(partial(follow, client), settings.streams, settings.prompt_len, seed)


def measure(settings: ItlSettings, roles: Roles, max_itl: float | None, seed: int) -> Gaps:
    given = {
        "load_format": settings.load_format,
        "roles": roles,
        "max_itl": max_itl,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
    }
    with Launcher(serve_settings(settings.model, given)) as launcher:
        address = launcher.start().grpc
        asyncio.run(gaps(address, settings, seed=0))  # warms the workers up
        return asyncio.run(gaps(address, settings, seed))


def main(argv: Sequence[str]) -> int:
    settings = ItlSettings.load(argv)
    arms = [(roles, limit) for roles in settings.roles for limit in settings.max_itl]
    found: dict[tuple[Roles, float | None], list[Gaps]] = {arm: [] for arm in arms}
    for number in range(1, settings.rounds + 1):
        for arm in arms if number % 2 else reversed(arms):
            found[arm].append(measure(settings, *arm, seed=number))
    print(f"{settings.model}, {settings.streams} streams, a prompt of {settings.prompt_len} tokens; {provenance()}")
    print(
        "| roles | limit (ms) | usual gap (ms) | worst gap (ms) | worst of all rounds (ms) | TTFT (ms) | TTFT ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    rows = []
    for (roles, limit), gaps in found.items():
        reference = found[roles, settings.max_itl[0]]
        row = {
            "roles": roles,
            "max_itl": limit,
            "usual_ms": statistics.median(gap.usual_ms for gap in gaps),
            "worst_ms": statistics.median(gap.worst_ms for gap in gaps),
            "most_ms": max(gap.worst_ms for gap in gaps),
            "ttft_ms": statistics.median(gap.ttft_ms for gap in gaps),
            "ttft_ratio": round(
                statistics.median(a.ttft_ms / b.ttft_ms for a, b in zip(gaps, reference, strict=True)), 3
            ),
        }
        rows.append(row)
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print(json.dumps({"bench": "itl", **provenance(), "settings": settings.model_dump(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
