"""Measures the benefit and the cost of a KV cache on disk (`python -m bench.served.disk_tier`).

A launch without a disk tier and a launch with one compute the same prompts. A third launch finds these prompts on disk,
and computes a new prompt of the same length before each of them. For some of them, it drops the files' pages from
memory first. `behind` is the time to the first token of a prompt that is sent while another prompt is computed. Its
blocks are either in the disk tier or already in the arena.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from bench.served.machine import provenance
from bench.served.startup import cpu_seconds
from common.settings import Settings, settings_config
from looseleaf.client import AsyncClient
from looseleaf.llm import serve_settings
from looseleaf.serve.launcher import Addresses, Launcher
from testing.system import inspect, wait_for

SHORT = 64
AHEAD_S = 0.02
_BEHIND = ("behind, disk", "behind, arena")


class DiskTierSettings(Settings):
    """The settings of the disk tier benchmark."""

    model_config = settings_config("LOOSELEAF_DISK_TIER_", "bench.served.disk_tier")

    model: str = Field("models/configs/llama-125m", description="Hugging Face model directory, with dummy weights")
    roles: str = "both"
    length: int = Field(2048, ge=64, description="tokens of a prompt")
    prompts: int = Field(12, ge=2, le=64)
    directory: Path | None = Field(None, description="a directory on the disk to measure; default: a temporary one")


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 500) for _ in range(length)]


async def first_token_s(client: AsyncClient, prompt_ids: Sequence[int]) -> float:
    """Sends a prompt, and returns the seconds until its first token."""
    start = time.perf_counter()
    async for delta in client.stream(list(prompt_ids), max_tokens=1, temperature=0.0):
        if delta.token_ids:
            return time.perf_counter() - start
    raise AssertionError("no token")


@dataclass(frozen=True, slots=True)
class Computed:
    """The measurements of a launch that computes all prompts."""

    times: list[float]
    """The times to first token of the prompts, in seconds."""
    short: list[float]
    """The times to first token of the short prompts that are sent between the long prompts, in seconds."""
    store_cpu_s: float
    """The CPU time of the block store per prompt, in seconds."""


async def computed(addresses: Addresses, prompts: Sequence[Sequence[int]], store: int) -> Computed:
    """Measures a launch that computes the prompts. `store` is the process id of the block store."""
    times: list[float] = []
    short: list[float] = []
    async with AsyncClient(addresses.grpc) as client:
        await first_token_s(client, prompt(-1, SHORT))
        cpu_before_s = cpu_seconds(store)
        for number, ids in enumerate(prompts):
            times.append(await first_token_s(client, ids))
            short += [await first_token_s(client, prompt(10_000 + 10 * number + i, SHORT)) for i in range(10)]
        await asyncio.sleep(1.0)  # until the last blocks are written
    return Computed(times, short, (cpu_seconds(store) - cpu_before_s) / len(prompts))


async def behind(client: AsyncClient, other: Sequence[int], ids: Sequence[int]) -> float:
    """Returns the seconds until the first token of a prompt that is sent shortly after another prompt."""
    ahead = asyncio.create_task(first_token_s(client, other))
    await asyncio.sleep(AHEAD_S)
    seconds = await first_token_s(client, ids)
    await ahead
    return seconds


def drop_pages(directory: Path) -> None:
    """Flushes the block files below `directory` to disk, and asks the kernel to drop their pages from memory."""
    for path in directory.rglob("blocks"):
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


async def restored(addresses: Addresses, directory: Path, prompts: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """Returns the times to first token in seconds, by the source of the prompt's KV."""
    found: dict[str, list[float]] = {name: [] for name in ("computed", "page cache", "disk", *_BEHIND)}
    length = len(prompts[0])
    async with AsyncClient(addresses.grpc) as client:
        await first_token_s(client, prompt(-1, SHORT))
        for number, ids in enumerate(prompts):
            found["computed"].append(await first_token_s(client, prompt(1000 + number, length)))
            if number % 4 == 0:
                found["page cache"].append(await first_token_s(client, ids))
            elif number % 4 == 1:
                drop_pages(directory)
                found["disk"].append(await first_token_s(client, ids))
            else:
                for where in _BEHIND:
                    found[where].append(await behind(client, prompt(2000 + 10 * number + len(where), length), ids))
    return found


def launch(settings: DiskTierSettings, directory: Path | None) -> Launcher:
    given: dict[str, Any] = {"load_format": "dummy", "roles": settings.roles, "memory_budget": "6GiB", "spare": 0}
    if directory is not None:
        given |= {"kv_disk": "8GiB", "kv_disk_dir": directory}
    return Launcher(serve_settings(settings.model, given), lambda line: None)


def all_stored(addresses: Addresses, least: int) -> int:
    """Waits until `least` blocks are on disk. Returns the size of a block in bytes."""
    state = wait_for(
        lambda: inspect(addresses.block_store), lambda s: s.disk_tier.num_blocks >= least, 60, "blocks are not stored"
    )
    return int(state.block_bytes)


def report(
    settings: DiskTierSettings, plain: Computed, stored: Computed, found: dict[str, list[float]], num_bytes: int
) -> None:
    median = statistics.median
    print(f"{settings.model}, prompts of {settings.length} tokens ({num_bytes / 1e6:.0f} MB); {provenance()}")
    print("| KV of the prompt | TTFT, median (ms) | of computing it |")
    print("|---|---|---|")
    for where, times in found.items():
        print(f"| {where} | {median(times) * 1e3:.1f} | {median(times) / median(found['computed']):.3f} |")
    long, short = median(stored.times) / median(plain.times), median(stored.short) / median(plain.short)
    print(f"TTFT with a disk tier / without: {long:.3f}, with prompts of {SHORT} tokens {short:.3f}")
    used, before = stored.store_cpu_s * 1e3, plain.store_cpu_s * 1e3
    print(f"CPU time of the store for a prompt: {used:.0f} ms, without a disk tier {before:.0f} ms")


def main(argv: Sequence[str]) -> int:
    settings = DiskTierSettings.load(argv)
    prompts = [prompt(number, settings.length) for number in range(settings.prompts)]
    with tempfile.TemporaryDirectory(dir=settings.directory) as name:
        directory = Path(name)
        with launch(settings, None) as launcher:
            addresses = launcher.start()
            plain = asyncio.run(computed(addresses, prompts, launcher.pids["block_store"]))
        with launch(settings, directory) as launcher:
            addresses = launcher.start()
            stored = asyncio.run(computed(addresses, prompts, launcher.pids["block_store"]))
            num_full = (settings.length - 1) // 16 * len(prompts)
            num_bytes = all_stored(addresses, num_full) * num_full // len(prompts)
        with launch(settings, directory) as launcher:
            found = asyncio.run(restored(launcher.start(), directory, prompts))
    report(settings, plain, stored, found, num_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
