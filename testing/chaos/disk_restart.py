"""A scenario that kills a whole deployment with SIGKILL while blocks are being copied to disk, and starts it again.

In each trial, a new deployment repeats the requests that the kill of the previous one interrupted, with their prompts
and caches as before. It also gets the greedy requests with a part of the answer appended to the prompt, as in the next
turn of a conversation, so that it reads blocks that decode has sealed.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from block_store.arena.arena import Arena
from block_store.arena.header import HeaderState
from block_store.disk.block_file import BlockFile
from common.types import SamplingParams
from looseleaf.client import AsyncClient
from testing.chaos.book import Case
from testing.chaos.disk import files_of
from testing.chaos.report import Report, percentile
from testing.chaos.run import Run, judge
from testing.chaos.stack import Plan, Stack
from testing.chaos.traffic import Answer, ask
from testing.system import inspect

KV_DISK_BYTES = 64 << 20
"""The space for copies of blocks on disk."""
KILL_S = 0.3
"""The longest time in seconds from the first copy to the kill."""
FIRST_COPY_S = 60.0


@dataclass(frozen=True, slots=True)
class Killed:
    """The state at a kill, in full blocks that were sealed in the arena."""

    num_copied: int
    """Number of blocks on disk."""
    num_pending: int
    """Number of blocks that were not on disk."""


def disk_restart(run: Run) -> Report:
    """Kills and restarts the deployment in each trial."""
    report, rng = run.report("disk-restart"), run.rng
    cases: Sequence[Case] = ()
    interrupted: list[Answer] = []
    repeated: list[Answer] = []
    killed: list[Killed] = []
    num_restored = 0
    with tempfile.TemporaryDirectory(prefix="looseleaf-chaos-") as name:
        directory = Path(name)
        for trial in range(run.trials + 1):
            with run.stack(Plan(workers=1, settings={"kv_disk": KV_DISK_BYTES, "kv_disk_dir": directory})) as stack:
                repeated += asyncio.run(_answers(stack, [*cases, *_next_turns(cases)], f"{trial - 1}"))
                num_restored += inspect(stack.addresses.block_store).disk_tier.num_restored
                if trial == run.trials:
                    judge(report, stack, repeated)
                    break
                cases = rng.sample(run.book, min(run.concurrency, len(run.book)))
                files = files_of(directory, stack.arena.layout)
                interrupted += asyncio.run(_answers_until_kill(stack, cases, f"{trial}", files, rng))
            killed.append(_killed(stack.arena, files))
    num_wrong = sum(not answer.right for answer in interrupted)
    report.none("answers that differ before a kill", num_wrong, len(interrupted), "requests")
    num_midway = sum(kill.num_copied > 0 and kill.num_pending > 0 for kill in killed)
    report.at_least("trials with copied blocks and blocks yet to be copied", num_midway, run.trials // 2)
    report.told("blocks at a kill: on disk, yet to be copied; p50", ", ".join(_middle(killed)))
    report.at_least("blocks restored", num_restored, run.trials)
    return report


async def _answers(stack: Stack, cases: Sequence[Case], salt: str) -> list[Answer]:
    """Sends all cases at the same time."""
    async with AsyncClient(stack.addresses.grpc) as client:
        return await asyncio.gather(*(ask(client, case, salt) for case in cases))


async def _answers_until_kill(
    stack: Stack, cases: Sequence[Case], salt: str, files: Path, rng: random.Random
) -> list[Answer]:
    """Sends all cases at the same time, and kills the deployment at a random moment soon after the first copy. Returns
    the answers as they are then.
    """
    blocks = files / "blocks"
    untouched, deadline = blocks.stat().st_mtime_ns, time.monotonic() + FIRST_COPY_S
    async with AsyncClient(stack.addresses.grpc) as client:
        tasks = [asyncio.create_task(ask(client, case, salt)) for case in cases]
        while blocks.stat().st_mtime_ns == untouched:
            assert time.monotonic() < deadline, "no block is copied to disk"
            await asyncio.sleep(0.005)
        await asyncio.sleep(rng.uniform(0, KILL_S))
        stack.kill_all()
        for task in tasks:
            task.cancel()
        return await asyncio.gather(*tasks)


def _next_turns(cases: Sequence[Case]) -> list[Case]:
    """Returns the greedy cases with the first half of the answer appended to the prompt."""
    turns = []
    for case in cases:
        if case.sampling == SamplingParams(temperature=0.0):
            [tokens] = case.expected
            half = len(tokens) // 2
            prompt, rest = (*case.prompt_ids, *tokens[:half]), tokens[half:]
            turns.append(replace(case, prompt_ids=prompt, max_tokens=len(rest), expected=(rest,)))
    return turns


def _killed(arena: Arena, files: Path) -> Killed:
    """Compares the arena of a deployment that has been killed with the blocks on disk."""
    sealed = {arena.hashes[block].tobytes() for block in np.flatnonzero(arena.states == HeaderState.SEALED)}
    sealed.discard(bytes(32))  # of partial blocks
    file = BlockFile(files, arena.block_bytes, KV_DISK_BYTES)
    try:
        num_copied = sum(one in file for one in sealed)
    finally:
        file.close()
    return Killed(num_copied, len(sealed) - num_copied)


def _middle(killed: Sequence[Killed]) -> list[str]:
    counts = ([kill.num_copied for kill in killed], [kill.num_pending for kill in killed])
    return [f"{percentile(values, 0.5):.0f}" for values in counts]
