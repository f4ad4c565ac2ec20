"""Measures the benefit and the cost of a KV cache on disk (`python -m bench.served.disk_tier`).

A launch without a disk tier and a launch with one compute the same prompts. A third launch finds these prompts on disk,
and computes a new prompt of the same length before each of them. For some of them, it drops the files' pages from
memory first. `behind` is the time to the first token of a prompt that is sent while another prompt is computed. Its
blocks are either in the disk tier or already in the arena.

Three further launches, of workers of both roles, measure the time to first token of such a prompt while other requests
are decoded, and the longest gap between two tokens of these requests. The first launch computes the prompts. The second
one restores them during the steps of the other requests, and the third one between steps (`restore_in_turn`).
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from bench.served import peers_gap
from bench.served.itl import follow
from bench.served.machine import provenance
from bench.served.peers_gap import Gaps
from bench.served.startup import cpu_seconds
from common.settings import Settings, settings_config
from looseleaf.client import AsyncClient
from looseleaf.llm import serve_settings
from looseleaf.serve.children import Child
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
    prompts: int = Field(12, ge=0, le=64, description="at least 3, or 0 to measure only beside decodes")
    streams: int = Field(8, ge=1, le=64, description="decodes beside which prompts are restored")
    rounds: int = Field(5, ge=1, description="prompts that are restored beside decodes")
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


class InTurn(Launcher):
    """A launcher whose workers, which must have both roles, do not overlap restores with steps."""

    def _spawn(self, name: str, package: str, flags: Sequence[str], extra: Mapping[str, str] | None = None) -> Child:
        entry = "bench.served.restore_in_turn" if package == "looseleaf.both_roles" else package
        return super()._spawn(name, entry, flags, extra)


def launch(
    settings: DiskTierSettings, directory: Path | None, kind: type[Launcher] = Launcher, **more: object
) -> Launcher:
    given: dict[str, Any] = {"load_format": "dummy", "roles": settings.roles, "memory_budget": "6GiB", "spare": 0}
    if directory is not None:
        given |= {"kv_disk": "8GiB", "kv_disk_dir": directory}
    return kind(serve_settings(settings.model, given | more), lambda line: None)


async def gaps(addresses: Addresses, directory: Path, settings: DiskTierSettings) -> list[Gaps]:
    """Measures each prompt beside decodes. Drops the files' pages from memory before each of them."""
    found = []
    async with AsyncClient(addresses.grpc) as client:
        await first_token_s(client, prompt(-1, SHORT))
        for seed in range(settings.rounds):
            drop_pages(directory)
            found.append(await peers_gap.gaps(partial(follow, client), settings.streams, settings.length, seed))
    return found


def beside_decodes(settings: DiskTierSettings, directory: Path) -> dict[str, list[Gaps]]:
    """Returns the measurements beside decodes, by the way in which the prompts' KV is obtained."""
    kinds = {"computed": Launcher, "restored during steps": Launcher, "restored between steps": InTurn}
    found: dict[str, list[Gaps]] = {}
    for name, kind in kinds.items():
        with launch(settings, directory, kind, roles="both") as launcher:
            addresses = launcher.start()
            found[name] = asyncio.run(gaps(addresses, directory, settings))
            num_full = (settings.length - 1) // 16 * settings.rounds
            if name == "computed":
                all_stored(addresses, num_full)
            else:
                num_restored = inspect(addresses.block_store).disk_tier.num_restored
                assert num_restored >= num_full, f"{num_restored} of {num_full} blocks were restored"
    return found


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


def report_gaps(settings: DiskTierSettings, found: dict[str, list[Gaps]]) -> None:
    print(
        f"Beside {settings.streams} decodes, {settings.rounds} prompts that are not in the page cache; {provenance()}"
    )
    print("| KV of the prompt | TTFT, median (ms) | usual gap (ms) | worst gap, median (ms) | worst gap, most (ms) |")
    print("|---|---|---|---|---|")
    for name, each in found.items():
        ttft = statistics.median(gap.ttft_ms for gap in each)
        usual = statistics.median(gap.usual_ms for gap in each)
        worst = [gap.worst_ms for gap in each]
        print(f"| {name} | {ttft:.0f} | {usual:.1f} | {statistics.median(worst):.1f} | {max(worst):.1f} |")


def alone(settings: DiskTierSettings) -> None:
    """Measures prompts without decodes beside them, and prints a table."""
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


def main(argv: Sequence[str]) -> int:
    settings = DiskTierSettings.load(argv)
    if settings.prompts:
        alone(settings)
    with tempfile.TemporaryDirectory(dir=settings.directory) as name:
        report_gaps(settings, beside_decodes(settings, Path(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
