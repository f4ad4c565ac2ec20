"""A scenario in which clients cancel their requests. It measures the time until the workers stop computing. A round
starts a few requests at once, cancels at a random moment those that have not ended, and polls the ledger until workers
hold only their reserve. The result of a round is therefore the time of its slowest cancel. It includes the path through
the client and the gateway.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from block_store.ledger.inspection import inspect
from block_store.ledger.scripts import LedgerScripts
from looseleaf.client import AsyncClient
from testing.chaos.book import Case
from testing.chaos.report import Report, percentile
from testing.chaos.run import Run, judge
from testing.chaos.stack import Stack
from testing.chaos.traffic import ask
from testing.system import assert_nothing_held

TOGETHER = 10
"""The number of requests in a round."""
LATEST_S = 0.6
"""The longest time, in seconds, between the start of a round's requests and their cancellation."""
WAIT_S = 10.0
POLL_S = 0.005
LIMIT_MS = 250.0
SHORTEST_PROMPT = 17
"""The minimum length of a prompt in tokens. Such a prompt fills a block, so each sequence on a decode worker holds a
sealed block, which is not counted as reserved.
"""


def cancels(run: Run) -> Report:
    """Starts at least `trials` requests in rounds of TOGETHER, and cancels those that have not ended."""
    report = run.report("cancels")
    book = [case for case in run.book if len(case.prompt_ids) >= SHORTEST_PROMPT and case.max_tokens >= 64]
    with run.stack() as stack:
        rounds = asyncio.run(_rounds(stack, book, -(-run.trials // TOGETHER), run.rng))
        took = [1000 * seconds for _, seconds in rounds]
        cut = sum(num_cut for num_cut, _ in rounds)
        report.told("requests cut off before their end", f"{cut:,} of {len(rounds) * TOGETHER:,}")
        report.told("until no worker computes for them, p50", f"{percentile(took, 0.5):.0f} ms")
        report.at_most("until no worker computes for them, p99", percentile(took, 0.99), LIMIT_MS, "ms")
        report.told("until no worker computes for them, most", f"{max(took, default=0):.0f} ms")
        with run.traffic(stack) as traffic:
            traffic.wait_for(2 * run.concurrency, timeout_s=60)
            judge(report, stack, traffic.stop())  # judges the requests after the cancels
        assert_nothing_held(stack.addresses.block_store)
    return report


async def _rounds(stack: Stack, book: Sequence[Case], num_rounds: int, rng: random.Random) -> list[tuple[int, float]]:
    """Returns, for each round, the number of cancelled requests and the seconds until the workers were idle."""
    async with AsyncClient(stack.addresses.grpc) as client:
        return [await _round(client, stack.ledger(), book, rng) for _ in range(num_rounds)]


async def _round(
    client: AsyncClient, ledger: LedgerScripts, book: Sequence[Case], rng: random.Random
) -> tuple[int, float]:
    salt = str(rng.getrandbits(60))
    tasks = [asyncio.create_task(ask(client, rng.choice(book), salt)) for _ in range(TOGETHER)]
    await asyncio.sleep(rng.random() * LATEST_S)
    running = [task for task in tasks if not task.done()]
    began = time.monotonic()
    for task in running:
        task.cancel()
    while not await asyncio.to_thread(_idle, ledger):
        if time.monotonic() > began + WAIT_S:
            raise TimeoutError(f"workers still compute {WAIT_S:.0f} s after every request was cancelled")
        await asyncio.sleep(POLL_S)
    seconds = time.monotonic() - began
    await asyncio.gather(*tasks)
    return len(running), seconds


def _idle(ledger: LedgerScripts) -> bool:
    """Returns whether prefill workers hold no blocks, and decode workers no sealed blocks. Tickets are ignored."""
    now = inspect(ledger)
    held = {holder.name: holder.num_references for holder in now.holders if holder.kind == "worker"}
    prefill = sum(count for name, count in held.items() if name.startswith("prefill"))
    return prefill == 0 and sum(held.values()) == now.counts.reserved
