"""Scenarios in which a worker is killed with -9 while it serves.

Each trial kills one worker and waits until its successor serves, so that there is always a second one of its role.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from looseleaf.chaos.held import HeldAfter
from looseleaf.chaos.report import Report, percentile
from looseleaf.chaos.run import Run, judge
from looseleaf.chaos.stack import Stack
from looseleaf.chaos.traffic import Answer

BACK = r"a sequence of (\d+) tokens came back: (\d+) computed again"
"""What a prefill worker logs of a sequence that was decoding already."""


def decode_kill(run: Run) -> Report:
    """Decode workers, in turn, killed in mid-stream."""
    report, rng = run.report("decode-kill"), run.rng
    with run.stack() as stack:
        held = HeldAfter(stack)
        with run.traffic(stack) as traffic:
            traffic.wait_for(run.concurrency, timeout_s=60)
            kills = [kill_one(stack, f"decode-{trial % 2}", rng, held) for trial in range(run.trials)]
            answers = traffic.stop()
        judge(report, stack, answers)
        _tell_recovery(report, stack, answers, kills)
        held.tell(report)
    return report


def kill_one(stack: Stack, name: str, rng: random.Random, held: HeldAfter) -> float:
    """Kill one worker at a random moment and wait until its successor is given requests. Returns the moment."""
    time.sleep(rng.random() * 0.3)
    dead, pid = stack.holder(name), stack.pids[name]
    moment = stack.kill(name)
    held.died(moment, dead)
    stack.wait_back(name, pid, dead.epoch)
    return moment


def _tell_recovery(report: Report, stack: Stack, answers: Sequence[Answer], kills: Sequence[float]) -> None:
    hit = [answer for answer in answers if any(answer.spans(kill) for kill in kills)]
    report.told("requests in flight at a kill", f"{len(hit):,}")
    gaps = [answer.longest_gap_s for answer in hit]
    report.told("longest gap p50 of these", f"{percentile(gaps, 0.5):.2f} s")
    report.at_most("longest gap p99 of these", percentile(gaps, 0.99), 2.0, "s")
    again = [int(match[2]) for _, match in stack.lines(BACK, service="prefill")]
    report.told("sequences that came back to prefill", f"{len(again):,}")
    report.told("tokens computed again for one, p50", f"{percentile(again, 0.5):.0f}")
    report.at_most("tokens computed again for one, most", max(again, default=0), 16, "tokens (one block)")
