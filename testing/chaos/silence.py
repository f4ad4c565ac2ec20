"""Scenarios with many streams. The streams must continue while Redis is silent for some seconds, and when Redis is
killed while workers hold many blocks.

These scenarios measure the gaps in streams. The scenarios in `outages` check the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from block_store.errors import BlockStoreError
from looseleaf.client import AsyncClient
from testing.chaos.book import Case, make_book
from testing.chaos.report import Report, percentile
from testing.chaos.run import Run
from testing.chaos.stack import Plan, Stack
from testing.system import assert_nothing_held

STREAMS = (8, 32, 128)
SILENT_S = 4.0
RUN_IN_S = 2.0
"""The time between the last stream's first token and the loss of Redis, during which a beat fills the reserve."""
MOST_S = 0.5
MANY_STREAMS, SMALL_BLOCK = 96, 4
"""The number of streams, and the block size in tokens. A stream needs up to about 500 blocks."""
LOST_MOST_S = 5.0
MAX_MODEL_LEN = 2048
OUTPUT_LENGTHS = (1500, 1900)
NUM_CASES = 8
TRACEBACK = r"^Traceback"
Loss = Callable[[Stack], Awaitable[None]]
"""A function that stops Redis and starts it again."""


@dataclass(slots=True)
class Stream:
    """The tokens that the client of a request has received, and the arrival times of the messages with the tokens."""

    case: Case
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return tuple(self.tokens) == self.case.expected[0]

    def longest_gap_s(self, since: float) -> float:
        """Returns the longest gap between two consecutive messages, in seconds. Only gaps that ended after `since`
        count; if there are none, returns 0.
        """
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


def silent(run: Run) -> Report:
    """Makes Redis silent `trials` times for each number of streams."""
    report = run.report("redis-silent")
    plan = Plan(num_blocks=1 << 16, max_model_len=MAX_MODEL_LEN, workers=1, max_num_seqs=max(STREAMS))
    with run.stack(plan) as stack:
        for num_streams in STREAMS:
            _lose_under(report, stack, _cases(run), (num_streams, run.trials), _silence, MOST_S)
        report.none("tracebacks in the log", len(stack.lines(TRACEBACK)), len(STREAMS) * run.trials, "silences")
        assert_nothing_held(stack.addresses.block_store)
    return report


def lost(run: Run) -> Report:
    """Kills Redis `trials` times while a worker holds many blocks."""
    report = run.report("redis-lost-large")
    plan = Plan(
        num_blocks=1 << 17, max_model_len=MAX_MODEL_LEN, workers=1, max_num_seqs=MANY_STREAMS, block_size=SMALL_BLOCK
    )
    with run.stack(plan) as stack:
        _lose_under(report, stack, _cases(run), (MANY_STREAMS, run.trials), partial(_kill, report), LOST_MOST_S)
        assert_nothing_held(stack.addresses.block_store)
    return report


def _cases(run: Run) -> list[Case]:
    book = make_book(run.model, NUM_CASES, seed=run.seed, output_lengths=OUTPUT_LENGTHS, max_model_len=MAX_MODEL_LEN)
    return [case for case in book if case.streamed and case.sampling.num_sequences == 1]


async def _silence(stack: Stack) -> None:
    stack.redis.freeze()
    try:
        await asyncio.sleep(SILENT_S)
    finally:
        stack.redis.thaw()


async def _kill(report: Report, stack: Stack) -> None:
    """Kills Redis and starts it again, empty. Returns when the decode worker holds at least as many blocks in the new
    ledger as it held in the old ledger, or after 60 s.
    """
    before, began = stack.holder("decode"), time.monotonic()
    stack.redis.kill()
    stack.redis.start_empty()

    def is_whole() -> bool:
        try:
            now = stack.holder("decode")
        except (BlockStoreError, KeyError):
            return False
        return now.epoch != before.epoch and now.num_references >= before.num_references

    while not is_whole() and time.monotonic() < began + 60:
        await asyncio.sleep(0.05)
    report.told("references of the decode worker", f"{before.num_references:,}")
    report.at_most("from Redis' end until it has its ledger", time.monotonic() - began, LOST_MOST_S, "s")


def _lose_under(
    report: Report, stack: Stack, cases: Sequence[Case], streams_and_trials: tuple[int, int], lose: Loss, most_s: float
) -> None:
    num_streams, trials = streams_and_trials
    streams: list[Stream] = []
    gaps: list[float] = []
    for trial in range(trials):
        asked = [replace(cases[i % len(cases)]) for i in range(num_streams)]
        began, found = asyncio.run(_ask_all(stack, asked, f"{num_streams}/{trial}", lose))
        streams += found
        gaps += [stream.longest_gap_s(began) for stream in found]
    report.none(f"{num_streams} streams: wrong or cut", sum(not s.right for s in streams), len(streams), "streams")
    running = sum(gap > 0 for gap in gaps)
    report.at_least(f"{num_streams} streams: still running when Redis was lost", running, 0.9 * len(gaps))
    report.told(f"{num_streams} streams: longest gap from then on, p50", f"{percentile(gaps, 0.5):.2f} s")
    report.at_most(f"{num_streams} streams: longest gap from then on", max(gaps), most_s, "s")


async def _ask_all(stack: Stack, cases: Sequence[Case], salt: str, lose: Loss) -> tuple[float, list[Stream]]:
    """Starts all streams, and calls `lose` RUN_IN_S after all of them have received tokens. Returns the time of that
    call, and the streams after their end. Each stream has a different salt, so no two streams share a block.
    """
    streams = [Stream(case) for case in cases]
    async with AsyncClient(stack.addresses.grpc) as client:
        tasks = [asyncio.create_task(_follow(client, stream, f"{salt}/{i}")) for i, stream in enumerate(streams)]
        while not all(stream.times for stream in streams):
            await asyncio.sleep(0.02)
            if failed := next((task for task in tasks if task.done() and task.exception()), None):
                failed.result()
        await asyncio.sleep(RUN_IN_S)
        began = time.monotonic()
        await lose(stack)
        await asyncio.gather(*tasks)
    return began, streams


async def _follow(client: AsyncClient, stream: Stream, salt: str) -> None:
    async for delta in client.stream(list(stream.case.prompt_ids), **stream.case.options(salt)):
        stream.tokens += delta.token_ids
        stream.times.append(time.monotonic())
