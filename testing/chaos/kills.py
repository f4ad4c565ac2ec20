"""Scenarios that kill a worker with SIGKILL under load. Each trial kills one of two workers of a role, and waits until
its successor serves.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from testing.chaos.faulty import DIED, PHASES, Faults
from testing.chaos.held import HeldAfter
from testing.chaos.report import Report, percentile
from testing.chaos.run import Run, judge
from testing.chaos.stack import BACK_S, Plan, Stack
from testing.chaos.traffic import Answer
from testing.system import wait_for

GAP_MOST_S = 2.0
BACK = r"(\d+) sequences came back: (\d+) tokens computed again, at most (\d+) of one"
"""A pattern for the log lines of prefill workers about sequences that returned from decode."""


def decode_kill(run: Run) -> Report:
    """Kills decode workers, in turn, during streams."""
    with run.stack() as stack:
        return decode_kill_on(run, stack)


def decode_kill_on(run: Run, stack: Stack) -> Report:
    """Runs `decode_kill` on an existing stack."""
    report, rng, held = run.report("decode-kill"), run.rng, HeldAfter(stack)
    with run.traffic(stack) as traffic:
        traffic.wait_for(run.concurrency, timeout_s=120)
        kills = [kill_one(stack, f"decode-{trial % 2}", rng, held) for trial in range(run.trials)]
        answers = traffic.stop()
    judge(report, stack, answers)
    _tell_recovery(report, stack, answers, kills)
    held.tell(report)
    return report


def prefill_kill(run: Run) -> Report:
    """Makes prefill workers, in turn, kill themselves in a chosen phase. In every fifth trial, kills the worker at a
    random moment instead.
    """
    report, rng = run.report("prefill-kill"), run.rng
    with tempfile.TemporaryDirectory(prefix="looseleaf-chaos-notes-") as notes:
        faults = Faults(death_notes=notes)
        packages = {"prefill_svc": "testing.chaos.faulty_prefill"}
        with run.stack(Plan(packages=packages, variables=faults.variables())) as stack:
            held = HeldAfter(stack)
            with run.traffic(stack) as traffic:
                traffic.wait_for(run.concurrency, timeout_s=120)
                kills = [_kill_in_phase(stack, Path(notes), trial, rng, held) for trial in range(run.trials)]
                answers = traffic.stop()
            judge(report, stack, answers)
            report.told(
                "longest gap p99 of those in flight at a kill", f"{percentile(_gaps(answers, kills), 0.99):.2f} s"
            )
            _tell_phases(report, stack, run.trials)
            held.tell(report)
    return report


def _kill_in_phase(stack: Stack, notes: Path, trial: int, rng: random.Random, held: HeldAfter) -> float:
    """Kills one worker, in the phase of this trial or at a random moment. Returns the approximate time of its death."""
    name, phase = f"prefill-{trial % 2}", [*PHASES, None][trial % (len(PHASES) + 1)]
    if phase is None:
        return kill_one(stack, name, rng, held)
    dead, pid = stack.holder(name), stack.pids[name]
    (notes / name).write_text(phase)
    wait_for(lambda: stack.pids[name], lambda now: now != pid, BACK_S, f"{name} has not died in phase {phase}")
    moment = time.monotonic()
    held.died(moment, dead)
    stack.wait_back(name, pid, dead.epoch)
    return moment


def _tell_phases(report: Report, stack: Stack, trials: int) -> None:
    found = Counter(match[1] for _, match in stack.lines(f"{DIED}(.+)"))
    for phase in PHASES:
        report.told(f"killed in phase: {phase}", str(found[phase]))
    report.told("killed at a random moment", str(trials - found.total()))


def kill_one(stack: Stack, name: str, rng: random.Random, held: HeldAfter) -> float:
    """Kills one worker at a random moment and waits until its successor gets requests. Returns the time of the kill."""
    time.sleep(rng.random() * 0.3)
    dead, pid = stack.holder(name), stack.pids[name]
    moment = stack.kill(name)
    held.died(moment, dead)
    stack.wait_back(name, pid, dead.epoch)
    return moment


def _tell_recovery(report: Report, stack: Stack, answers: Sequence[Answer], kills: Sequence[float]) -> None:
    gaps = _gaps(answers, kills)
    report.told("streamed requests in flight at a kill (no beams)", f"{len(gaps):,}")
    report.told("longest gap p50 of these", f"{percentile(gaps, 0.5):.2f} s")
    report.at_most("longest gap p99 of these", percentile(gaps, 0.99), GAP_MOST_S, "s")
    back = [[int(number) for number in match.groups()] for _, match in stack.lines(BACK, service="prefill")]
    count = sum(sequences for sequences, _, _ in back)
    report.told("sequences that came back to prefill (no beams)", f"{count:,}")
    report.told("tokens computed again for one, mean", f"{sum(tokens for _, tokens, _ in back) / max(1, count):.1f}")
    report.at_most(
        "tokens computed again for one, most", max((most for _, _, most in back), default=0), 16, "tokens (one block)"
    )


def _gaps(answers: Sequence[Answer], kills: Sequence[float]) -> list[float]:
    """Returns, for each streamed request that was in flight at a kill, its longest gap in seconds."""
    streamed = [answer for answer in answers if answer.case.streamed]
    return [answer.longest_gap_s for answer in streamed if any(answer.spans(kill) for kill in kills)]
