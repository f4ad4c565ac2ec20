"""Scenario of a Redis that stops answering for some seconds under many running streams, which must not notice.

What the outages ask of the ledger is asked there; here it is how long a stream pauses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from looseleaf.chaos.book import Case, make_book
from looseleaf.chaos.report import Report, percentile
from looseleaf.chaos.run import Run
from looseleaf.chaos.stack import Plan, Stack
from looseleaf.client import AsyncClient
from looseleaf.testing import assert_nothing_held

STREAMS = (8, 32, 128)
SILENT_S = 4.0
RUN_IN_S = 2.0
"""From the last stream's first token until Redis falls silent: a beat fills the reserve."""
MOST_S = 0.5
MAX_MODEL_LEN = 2048
OUTPUT_LENGTHS = (1500, 1900)
NUM_CASES = 8
TRACEBACK = r"^Traceback"


@dataclass(slots=True)
class Stream:
    """One request as its client sees it."""

    case: Case
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return tuple(self.tokens) == self.case.expected[0]

    def longest_gap_s(self, since: float) -> float:
        """Between two messages, of those that ended after `since`; 0 if there is none."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


def silent(run: Run) -> Report:
    """`trials` times for each number of streams."""
    report = run.report("redis-silent")
    book = make_book(run.model, NUM_CASES, seed=run.seed, output_lengths=OUTPUT_LENGTHS, max_model_len=MAX_MODEL_LEN)
    cases = [case for case in book if case.streamed and case.sampling.num_sequences == 1]
    plan = Plan(num_blocks=1 << 16, max_model_len=MAX_MODEL_LEN, workers=1, max_num_seqs=max(STREAMS))
    with run.stack(plan) as stack:
        for num_streams in STREAMS:
            silent_on(report, stack, cases, num_streams, run.trials)
        report.none("tracebacks in the log", len(stack.lines(TRACEBACK)), len(STREAMS) * run.trials, "silences")
        assert_nothing_held(stack.addresses.block_store)
    return report


def silent_on(report: Report, stack: Stack, cases: Sequence[Case], num_streams: int, trials: int) -> None:
    """The same on a stack that is there."""
    streams: list[Stream] = []
    gaps: list[float] = []
    for trial in range(trials):
        asked = [replace(cases[i % len(cases)]) for i in range(num_streams)]
        began, found = asyncio.run(_under_silence(stack, asked, salt=f"{num_streams}/{trial}"))
        streams += found
        gaps += [stream.longest_gap_s(began) for stream in found]
    report.none(f"{num_streams} streams: wrong or cut", sum(not s.right for s in streams), len(streams), "streams")
    running = sum(gap > 0 for gap in gaps)
    report.at_least(f"{num_streams} streams: still running when Redis fell silent", running, 0.9 * len(gaps))
    report.told(f"{num_streams} streams: longest gap from then on, p50", f"{percentile(gaps, 0.5):.2f} s")
    report.at_most(f"{num_streams} streams: longest gap from then on", max(gaps), MOST_S, "s")


async def _under_silence(stack: Stack, cases: Sequence[Case], salt: str) -> tuple[float, list[Stream]]:
    """When Redis fell silent, and the streams, ended."""
    streams = [Stream(case) for case in cases]
    async with AsyncClient(stack.addresses.grpc) as client:
        tasks = [asyncio.create_task(_follow(client, stream, salt)) for stream in streams]
        while not all(stream.times for stream in streams):
            await asyncio.sleep(0.02)
            if failed := next((task for task in tasks if task.done() and task.exception()), None):
                failed.result()
        await asyncio.sleep(RUN_IN_S)
        began = time.monotonic()
        stack.redis.freeze()
        try:
            await asyncio.sleep(SILENT_S)
        finally:
            stack.redis.thaw()
        await asyncio.gather(*tasks)
    return began, streams


async def _follow(client: AsyncClient, stream: Stream, salt: str) -> None:
    async for piece in client.stream(list(stream.case.prompt_ids), **stream.case.options(salt)):
        stream.tokens += piece.token_ids
        stream.times.append(time.monotonic())
