"""Measures the effect of one tenant on another: `python -m loadtest.tenants`.

Serves the built-in model with two tenants. First measures how well the time to first token distinguishes a known prompt
from a new one, for prompts of the same tenant and of the other tenant. The result is the area under the ROC curve: 0.5
means chance, and 1 means certainty. Then one tenant floods the service: it keeps many streams open, at the best
priority that its key allows, while the other tenant sends requests one after another. The output shows the other
tenant's times to first token and refusals. The last line is JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import Field

from common.errors import ResourceExhausted, StartupError
from common.settings import Settings, settings_config
from loadtest.latency import percentile_ms
from looseleaf import LLM, AsyncClient
from testing.system import prompts

KEYS = "greedy greedy-key best_priority=-10\nother other-key\n"
BEST_PRIORITY = -10
SETTLE_S = 5.0
"""The time in seconds after which the streams have started and the gateway has measured their rate."""


class TenantsSettings(Settings):
    """Flags of `python -m loadtest.tenants`, which measures how a tenant that floods the service affects another
    tenant, and how much a tenant can learn about another tenant's prompts.
    """

    model_config = settings_config("LOOSELEAF_TENANTS_", "loadtest.tenants")

    streams: int = Field(300, ge=1, description="streams that the greedy tenant keeps open")
    stream_tokens: int = Field(900, ge=2, description="output tokens of each stream")
    flood_s: float = Field(60.0, gt=0, description="seconds for which the other tenant sends its requests meanwhile")
    output_tokens: int = Field(8, ge=1, description="output tokens of each of these requests")
    probes: int = Field(250, ge=0, description="prompts of each kind whose first token is timed")
    probe_tokens: int = Field(900, ge=32, description="length of these prompts")


@dataclass(slots=True)
class Seen:
    """The observations of the other tenant."""

    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    refusals: int = 0


def flood(address: str, streams: int, tokens: int) -> None:
    """Keeps `streams` streams open until this process is ended."""
    asyncio.run(_flood(address, streams, tokens))


async def _flood(address: str, streams: int, tokens: int) -> None:
    async def keep_open(prompt: list[int]) -> None:
        while True:
            try:
                async for _ in client.stream(prompt, max_tokens=tokens, ignore_eos=True, priority=BEST_PRIORITY):
                    pass
            except ResourceExhausted as refusal:
                await asyncio.sleep(min(1.0, refusal.retry_after_s or 1.0))

    async with AsyncClient(address, api_key="greedy-key") as client:
        await asyncio.gather(*(keep_open(prompt) for prompt in prompts(streams, seed=1, lengths=(16, 48))))


async def send_meanwhile(llm: LLM, settings: TenantsSettings) -> Seen:
    """Sends requests one after another for `flood_s` seconds, and returns the observations."""
    seen, until = Seen(), time.perf_counter() + settings.flood_s
    async with AsyncClient(llm.addresses.grpc, api_key="other-key") as client:
        for prompt in prompts(100_000, seed=2, lengths=(16, 48)):
            started = time.perf_counter()
            if started > until:
                break
            try:
                first_s = await _time(client, prompt, settings.output_tokens)
            except ResourceExhausted:
                seen.refusals += 1
                await asyncio.sleep(0.05)
                continue
            seen.first_s.append(first_s)
            seen.whole_s.append(time.perf_counter() - started)
    return seen


async def _time(client: AsyncClient, prompt: list[int], tokens: int) -> float:
    """Sends a request, and waits until its last token has arrived. Returns the seconds to the first token."""
    started, first_s = time.perf_counter(), 0.0
    async for piece in client.stream(prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0):
        if piece.token_ids and not first_s:
            first_s = time.perf_counter() - started
    return first_s


async def timings(llm: LLM, settings: TenantsSettings) -> dict[str, list[float]]:
    """Returns the times to first token, in seconds, of new prompts and of prompts that "greedy" has sent before, for
    "greedy" and for "other".
    """
    length = (settings.probe_tokens, settings.probe_tokens)
    kinds = prompts(3 * settings.probes, seed=3, lengths=length)
    waits: dict[str, list[float]] = {"new": [], "own": [], "another's": [], "new to both": []}
    async with AsyncExitStack() as stack:
        greedy, other = [
            await stack.enter_async_context(AsyncClient(llm.addresses.grpc, api_key=f"{name}-key"))
            for name in ("greedy", "other")
        ]
        for index in range(settings.probes):
            first, second, third = kinds[3 * index : 3 * index + 3]
            waits["new"].append(await _time(greedy, first, 1))
            waits["own"].append(await _time(greedy, first, 1))
            await _time(greedy, second, 1)
            waits["another's"].append(await _time(other, second, 1))
            waits["new to both"].append(await _time(other, third, 1))
    return waits


def area_under_curve(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Returns the probability that a random value of `slow` exceeds a random value of `fast`. A tie counts as half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in slow for b in fast)
    return round(wins / (len(slow) * len(fast)), 3)


def flooded(llm: LLM, settings: TenantsSettings) -> dict[str, object]:
    """Runs the flood, and returns the other tenant's times and refusals."""
    arguments = (llm.addresses.grpc, settings.streams, settings.stream_tokens)
    process = multiprocessing.get_context("spawn").Process(target=flood, args=arguments)
    process.start()
    try:
        time.sleep(SETTLE_S)
        seen = asyncio.run(send_meanwhile(llm, settings))
    finally:
        process.terminate()
        process.join()
    numbers: dict[str, object] = {"requests": len(seen.first_s), "refusals": seen.refusals}
    for name, waits in (("ttft", seen.first_s), ("whole", seen.whole_s)):
        for label, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            numbers[f"{name}_{label}_ms"] = percentile_ms(waits, share)
    return numbers


def main(settings: TenantsSettings) -> None:
    result: dict[str, object] = {"benchmark": "tenants", **settings.model_dump(mode="json")}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "keys")
        path.write_text(KEYS)
        path.chmod(0o600)
        with LLM(api_key_file=str(path)) as llm:
            if settings.probes:
                waits = asyncio.run(timings(llm, settings))
                result["auc_within"] = area_under_curve(waits["new"], waits["own"])
                result["auc_across"] = area_under_curve(waits["new to both"], waits["another's"])
                print(f"timing: AUC within a tenant {result['auc_within']}, across {result['auc_across']}")
            result |= flooded(llm, settings)
    print(
        f"other tenant beside {settings.streams} streams: {result['requests']} requests, {result['refusals']} refused"
    )
    for name in ("ttft", "whole"):
        print(
            f"{name:6} ms  " + ", ".join(f"{label} {result[f'{name}_{label}_ms']}" for label in ("p50", "p99", "max"))
        )
    print(json.dumps(result))


if __name__ == "__main__":
    try:
        main(TenantsSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"loadtest.tenants: {error}", file=sys.stderr)
        sys.exit(1)
