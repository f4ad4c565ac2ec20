"""Measures the effect on clients when the only worker that decodes is killed with SIGKILL
(`python -m bench.served.recovery`).

By default, runs several trials with a spare worker and several trials without one. Each trial kills the worker during
streams, and compares the streams with undisturbed streams.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from pydantic import Field

from bench.served.machine import provenance
from common.settings import Settings, settings_config
from looseleaf.client import AsyncClient
from looseleaf.llm import serve_settings
from looseleaf.serve.launcher import Addresses, Launcher
from looseleaf.serve.supervisor import Supervisor
from testing.system import assert_nothing_held, wait_for

PROMPT_LEN = 64
WARM_TOKENS = 16
"""The minimum number of tokens that each stream has when the worker is killed."""
LOADED_S = 300.0


class RecoverySettings(Settings):
    """The settings of the recovery benchmark."""

    model_config = settings_config("LOOSELEAF_RECOVERY_", "bench.served.recovery")

    model: str = Field("models/configs/llama-125m", description="Hugging Face model directory")
    load_format: Literal["auto", "dummy"] = "dummy"
    roles: list[Literal["both", "split"]] = Field(["both", "split"])
    spare: list[int] = Field([0, 1], description="spare workers, one launch each")
    streams: int = Field(4, ge=1, le=64)
    tokens: int = Field(128, ge=32, description="tokens of each stream")
    trials: int = Field(3, ge=1)


@dataclass(slots=True)
class Stream:
    """A stream as its client received it."""

    token_ids: list[int] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    """The times at which messages with tokens arrived."""

    @property
    def longest_gap_s(self) -> float:
        return max((later - earlier for earlier, later in pairwise(self.stamps)), default=0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of the trials of one launch."""

    roles: str
    spare: int
    gaps_s: list[float]
    """The longest gap of all streams in seconds, by trial."""
    usual_s: float
    """The longest gap of all undisturbed streams in seconds."""
    num_different: int

    def row(self) -> str:
        gaps = f"{statistics.median(self.gaps_s):.2f} | {max(self.gaps_s):.2f}"
        return f"| {self.roles} | {self.spare} | {gaps} | {self.usual_s:.2f} | {self.num_different} |"


async def follow(client: AsyncClient, prompt: Sequence[int], max_tokens: int, seen: Stream) -> None:
    deltas = client.stream(list(prompt), max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    async for delta in deltas:
        if delta.token_ids:
            seen.token_ids += delta.token_ids
            seen.stamps.append(time.monotonic())


async def streams(address: str, prompts: Sequence[Sequence[int]], max_tokens: int, victim: int | None) -> list[Stream]:
    """Runs all streams at once. When each stream has WARM_TOKENS tokens, kills the process `victim`, unless it is
    None.
    """
    seen = [Stream() for _ in prompts]
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for prompt, stream in zip(prompts, seen, strict=True):
            group.create_task(follow(client, prompt, max_tokens, stream))
        while victim is not None and min(len(stream.token_ids) for stream in seen) < WARM_TOKENS:
            await asyncio.sleep(0.005)
        if victim is not None:
            os.kill(victim, signal.SIGKILL)
    return seen


class Trials:
    """The trials of one launch."""

    def __init__(self, settings: RecoverySettings, launcher: Launcher, addresses: Addresses) -> None:
        rng = random.Random(1)
        self._settings = settings
        self._launcher = launcher
        self._addresses = addresses
        self._prompts = [[rng.randrange(10, 500) for _ in range(PROMPT_LEN)] for _ in range(settings.streams)]

    def run(self, roles: str, spare: int) -> Outcome:
        undisturbed = self._streams(None)
        name = "worker" if roles == "both" else "decode"
        found = []
        for _ in range(self._settings.trials):
            if spare:
                wait_for(lambda: self._launcher.spare_is_loaded, bool, LOADED_S, "no spare worker is loaded")
            found.append(self._streams(self._launcher.pids[name]))
        assert_nothing_held(self._addresses.block_store)
        different = sum(a.token_ids != b.token_ids for seen in found for a, b in zip(seen, undisturbed, strict=True))
        gaps = [max(stream.longest_gap_s for stream in seen) for seen in found]
        return Outcome(roles, spare, gaps, max(stream.longest_gap_s for stream in undisturbed), different)

    def _streams(self, victim: int | None) -> list[Stream]:
        return asyncio.run(streams(self._addresses.grpc, self._prompts, self._settings.tokens, victim))


def measure(settings: RecoverySettings, roles: str, spare: int) -> Outcome:
    given = {"load_format": settings.load_format, "roles": roles, "spare": spare}
    with Launcher(serve_settings(settings.model, given)) as launcher:
        addresses = launcher.start()
        supervisor = Supervisor(launcher)
        supervisor.start()
        try:
            return Trials(settings, launcher, addresses).run(roles, spare)
        finally:
            supervisor.end()


def main(argv: Sequence[str]) -> int:
    settings = RecoverySettings.load(argv)
    outcomes = [measure(settings, roles, spare) for roles in settings.roles for spare in settings.spare]
    print(f"{settings.model}, {settings.streams} streams; {provenance()}")
    print("| roles | spare | longest gap, median (s) | most (s) | undisturbed (s) | streams that differ |")
    print("|---|---|---|---|---|---|")
    for outcome in outcomes:
        print(outcome.row())
    return 1 if any(outcome.num_different for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
