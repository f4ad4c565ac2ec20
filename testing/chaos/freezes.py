"""A scenario in which workers are stopped (SIGSTOP) until their leases have expired, and then woken. A woken worker
must not use the blocks that it has lost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from testing.chaos.faulty import PACKAGES, Faults
from testing.chaos.held import HeldAfter
from testing.chaos.late import EFFECTIVE, late_calls
from testing.chaos.report import Report, percentile
from testing.chaos.run import Run, judge
from testing.chaos.stack import Plan, Stack

FROZEN_S = 10.0
FOUND_S = 3.0
POLL_S = 0.05
WORKERS = ("decode-0", "prefill-0", "decode-1", "prefill-1")
AT_ONCE = 2
"""The number of workers that are stopped at the same time, one of each role."""
FENCED = r"is fenced: |starting over: the worker's lease had expired"


@dataclass(frozen=True, slots=True)
class _Freeze:
    """A record of one worker that was stopped and woken."""

    found_after_s: float
    """The seconds until the gateway gave up the worker, or infinity if it did not do so within FROZEN_S."""
    by_silence: bool
    """Whether the gateway gave up the worker because a stream was silent."""
    fenced: bool
    """Whether the log of the woken process says that it was fenced."""
    survived: bool
    num_late: int
    """The number of ledger calls that the incarnation made after it had been fenced."""


def freeze(run: Run) -> Report:
    """Stops workers under load for 10 s each, a prefill and a decode worker at a time."""
    report = run.report("freeze")
    with run.stack(Plan(packages=PACKAGES, variables=Faults(late_counted=True).variables())) as stack:
        held = HeldAfter(stack)
        with run.traffic(stack) as traffic, ThreadPoolExecutor(AT_ONCE) as pair:
            traffic.wait_for(run.concurrency, timeout_s=60)
            names, freezes = [WORKERS[trial % len(WORKERS)] for trial in range(run.trials)], list[_Freeze]()
            for first in range(0, run.trials, AT_ONCE):
                freezes += pair.map(lambda name: _freeze_one(stack, name, held), names[first : first + AT_ONCE])
            answers = traffic.stop()
        judge(report, stack, answers)
        for by_silence, how in ((True, "by silence"), (False, "by absence from the registry")):
            found = [each.found_after_s for each in freezes if each.by_silence == by_silence]
            report.told(f"{len(found)} found {how} after, p50", f"{percentile(found, 0.5):.2f} s")
            report.at_most("  most", max(found, default=0.0), FOUND_S, "s")
        report.none("woken that were not fenced", sum(not f.fenced for f in freezes), len(freezes), "freezes")
        report.none("woken that did not survive", sum(not f.survived for f in freezes), len(freezes), "freezes")
        report.told("groups and prompts that woken workers sent away", str(_sent_away(stack)))
        _tell_late(report, stack, freezes)
        held.tell(report)
    return report


def _freeze_one(stack: Stack, name: str, held: HeldAfter) -> _Freeze:
    before, pid = stack.holder(name), stack.pids[name]
    silent_before = _prefills_silent(stack)
    stopped = stack.freeze(name)
    found, by_silence = _watch(stack, name, silent_before, stopped)
    woken = stack.thaw(name)
    stack.wait_registered(name, before.epoch)
    held.died(woken, before)
    stack.wait_used(name)
    fenced = bool(stack.lines(FENCED, service=name, since=woken))
    num_late = sum(times for (epoch, _, _), times in late_calls(stack.ledger()).items() if epoch == before.epoch)
    return _Freeze(found - stopped, by_silence, fenced, stack.pids[name] == pid, num_late)


def _tell_late(report: Report, stack: Stack, freezes: Sequence[_Freeze]) -> None:
    """Reports the ledger calls that woken workers made under their old incarnation."""
    calls, by_kind = late_calls(stack.ledger()), Counter[str]()
    for (_, operation, verdict), times in calls.items():
        by_kind[f"{operation} {verdict}"] += times
    total = sum(calls.values())
    effective = sum(times for (_, _, verdict), times in calls.items() if verdict == EFFECTIVE)
    report.none("woken that made no late call", sum(not f.num_late for f in freezes), len(freezes), "freezes")
    report.none("late ledger calls that had an effect", effective, total, "calls")
    for kind, times in sorted(by_kind.items()):
        report.told("  late " + kind, str(times))


def _watch(stack: Stack, name: str, silent_before: float, stopped: float) -> tuple[float, bool]:
    """Watches logs and metrics until FROZEN_S after `stopped`. Returns the time at which the gateway gave up the
    worker, and whether silence on a stream was the reason.
    """
    silent = rf"decode worker {name} has been silent"
    found: list[tuple[float, bool]] = []
    while (now := time.monotonic()) < stopped + FROZEN_S:
        if not found:
            found += [(line.at, True) for line, _ in stack.lines(silent, service="gateway", since=stopped)]
            found += [(line.at, False) for line, _ in stack.lines(f"worker {name} has left", since=stopped)]
            if name.startswith("prefill") and _prefills_silent(stack) > silent_before:
                found.append((now, True))
        time.sleep(POLL_S)
    return min(found, default=(float("inf"), False))


def _prefills_silent(stack: Stack) -> float:
    """Returns the number of requests that the gateway took from silent prefill workers. The number comes from a metric,
    because the gateway logs these requests about a second later.
    """
    return stack.metric("looseleaf_requests_retried_total", reason="prefill_silent")


def _sent_away(stack: Stack) -> int:
    return sum(int(match[1]) for _, match in stack.lines(r"starting over: .*; (\d+) "))
