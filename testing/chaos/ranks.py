"""Scenarios in which a rank of a decode worker is stopped (SIGSTOP) or killed under load. Its worker then ends. Each
trial chooses one of two workers, and waits until its successor serves.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, replace

from common.tensor_parallel import default_parts
from testing.chaos.book import make_book
from testing.chaos.held import HeldAfter
from testing.chaos.report import Report, percentile
from testing.chaos.run import Run, judge
from testing.chaos.stack import Plan, Stack
from testing.ranks import followers_of

NOTICED_S = 5.0
"""The maximum time in seconds from SIGSTOP of a rank to the log line of the first rank that has noticed it."""
GRIDS = {"tp-2": (2, 1), "pp-2": (1, 2), "tp-2-pp-2": (2, 2)}
"""The tensor-parallel and pipeline-parallel sizes of the decode workers of each scenario."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """A record of one rank that was stopped or killed."""

    at: float
    how: signal.Signals
    noticed_after_s: float
    """The seconds until the first rank logged that the rank is frozen, or infinity if it never did."""


def lost(run: Run, grid: str) -> Report:
    """Stops and kills ranks other than the first, in turn. Every other trial stops one."""
    size, stages = GRIDS[grid]
    report, rng = run.report(f"rank-loss-{grid}"), run.rng
    run = replace(run, book=make_book(run.model, len(run.book), seed=run.seed, reduction_parts=default_parts(size)))
    more = {"decode_tensor_parallel_size": size, "decode_pipeline_parallel_size": stages}
    with run.stack(Plan(settings=more)) as stack:
        held = HeldAfter(stack)
        with run.traffic(stack) as traffic:
            traffic.wait_for(run.concurrency, timeout_s=120)
            losses = [_lose_one(stack, trial, rng, held) for trial in range(run.trials)]
            answers = traffic.stop()
        judge(report, stack, answers)
        noticed = [loss.noticed_after_s for loss in losses if loss.how == signal.SIGSTOP]
        report.told("frozen ranks noticed after, p50", f"{percentile(noticed, 0.5):.2f} s")
        report.at_most("  most", max(noticed, default=0.0), NOTICED_S, "s")
        for how, name in ((signal.SIGSTOP, "freeze"), (signal.SIGKILL, "kill")):
            moments = [loss.at for loss in losses if loss.how == how]
            gaps = [a.longest_gap_s for a in answers if a.case.streamed and any(map(a.spans, moments))]
            report.told(f"longest gap p99 of those in flight at a {name}", f"{percentile(gaps, 0.99):.2f} s")
        held.tell(report)
    return report


def _lose_one(stack: Stack, trial: int, rng: random.Random, held: HeldAfter) -> _Loss:
    name, how = f"decode-{trial // 2 % 2}", (signal.SIGSTOP, signal.SIGKILL)[trial % 2]
    dead, pid = stack.holder(name), stack.pids[name]
    rank = rng.choice(followers_of(pid))
    time.sleep(rng.random() * 0.5)  # any moment between two beats
    moment = time.monotonic()
    os.kill(rank, how)
    stack.wait_back(name, pid, dead.epoch)
    found = stack.lines(rf"rank \d+ \(process {rank}\) is frozen", service=name, since=moment)
    noticed = found[0][0].at if found else float("inf")
    held.died(noticed if found else moment, dead)
    return _Loss(moment, how, noticed - moment)
