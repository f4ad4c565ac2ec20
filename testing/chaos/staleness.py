"""A scenario that forces staleness with leases shorter than the delays, a tiny arena, and frequent reallocation of
blocks.

A worker is stopped until other workers are about to write to half of its blocks, but for at most MOST_STOPPED_S. If it
wakes in the middle of a step, it may read blocks that it has lost. The reader rule must detect this before a token is
sent. In two of every three stops, the worker is told to stop itself in its next step (`faulty`). In the third, it is
stopped at a random moment. A second run, without the rule, must produce wrong tokens. Otherwise, the first run would
prove nothing.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.types import BlockRef
from testing.chaos.faulty import PACKAGES, Faults
from testing.chaos.report import Report
from testing.chaos.run import Run, judge
from testing.chaos.stack import Plan, Stack

LEASE_S = 0.5
MOST_STOPPED_S = 20.0
"""The maximum time in seconds for which a worker is stopped. It must be long, because a reaped worker's blocks are
evicted last.
"""
STEP_S = 1.0
"""The time in seconds within which a busy worker should begin a step."""
RENEWED_S = 3.0
"""The longest wait, in seconds, until a woken worker registers again. A worker that was not fenced does not do so."""
MAX_MODEL_LEN = 432
NUM_BLOCKS = 160
"""The number of blocks, slightly more than the floors of two prefill and two decode workers, 2 x 27 + 2 x (28 + 14).
Cached blocks are therefore evicted soon, including those of a stopped worker.
"""
LONGEST_OUTPUT = 128
"""The longest output of this scenario's requests, in tokens. The shorter the outputs are, the sooner blocks are
reallocated.
"""
MOST_ATTEMPTS = 100
CONCURRENCY = 20
"""The number of concurrent requests. They do not all fit, so groups are sometimes preempted."""
DETECTED = r"reader rule: (?:(\d+) groups|(\d+) prompts|group \d+) "
"""A pattern for the log lines about stale blocks. A group that was about to be swapped out counts as one sequence."""
SENT_AWAY = r"starting over: .*; (\d+) "
UNRULED_VICTIMS = 300
"""The number of victims within which the run without the rule must produce a wrong token."""


def staleness(run: Run) -> Report:
    """Stops workers until `trials` sequences have lost blocks. Then does the same without the reader rule, until there
    is a wrong answer, or until UNRULED_VICTIMS sequences have lost blocks.
    """
    report = run.report("staleness")
    with tempfile.TemporaryDirectory(prefix="looseleaf-chaos-notes-") as notes:
        _with_the_rule(run, report, Path(notes))
        _without_the_rule(run, report, Path(notes))
    return report


def _with_the_rule(run: Run, report: Report, notes: Path) -> None:
    with _stack(run, notes, reader_rule=True) as stack:
        with _hurried(run).traffic(stack, shared=False) as traffic:
            traffic.wait_for(CONCURRENCY, timeout_s=60)
            num_stops = _stop_until(stack, notes, run.rng, lambda: victims(stack) >= run.trials)
            answers = traffic.stop()
        judge(report, stack, answers)
        report.told("workers stopped", str(num_stops))
        report.at_least("victims: sequences of workers that lost their blocks", victims(stack), run.trials)
        report.at_least("found by the reader rule", _count(stack, DETECTED), 0.3 * run.trials)


def _without_the_rule(run: Run, report: Report, notes: Path) -> None:
    with _stack(run, notes, reader_rule=False) as stack:
        with _hurried(run).traffic(stack, shared=False) as traffic:
            traffic.wait_for(CONCURRENCY, timeout_s=60)
            _stop_until(
                stack,
                notes,
                run.rng,
                lambda: victims(stack) >= UNRULED_VICTIMS or any(not answer.right for answer in traffic.answers),
            )
            answers = traffic.stop()
        wrong = sum(not answer.right for answer in answers)
        report.told("without the reader rule: victims", f"{victims(stack):,}")
        report.at_least("without the reader rule: wrong answers", wrong, 1)


def _stack(run: Run, notes: Path, *, reader_rule: bool) -> Stack:
    faults = Faults(stop_notes=str(notes), lease_s=LEASE_S, reader_rule=reader_rule).variables()
    patient = {"LOOSELEAF_GATEWAY_MAX_ATTEMPTS": str(MOST_ATTEMPTS), "LOOSELEAF_GATEWAY_SILENCE_S": "60"}
    variables = faults | patient
    return run.stack(Plan(NUM_BLOCKS, MAX_MODEL_LEN, packages=PACKAGES, variables=variables))


def _hurried(run: Run) -> Run:
    book = [case for case in run.book if case.max_tokens <= LONGEST_OUTPUT]
    return Run(run.model, book, run.trials, run.seed, CONCURRENCY)


def _stop_until(stack: Stack, notes: Path, rng: random.Random, enough: Callable[[], bool]) -> int:
    """Stops workers, one at a time, until `enough` returns true. Of every six stops, four hit a decode worker and two
    hit a prefill worker. Returns the number of stops.
    """
    num_stops = 0
    while not enough():
        name = ("decode-0", "decode-1", "decode-0", "decode-1", "prefill-0", "prefill-1")[num_stops % 6]
        if num_stops % 3 < 2:
            _stop_in_step(notes / name)
        _stop_one(stack, name)
        num_stops += 1
        time.sleep(0.2 + 0.3 * rng.random())  # until the worker again has blocks to lose
    return num_stops


def _stop_in_step(note: Path) -> None:
    """Tells the worker to stop itself in its next step, and waits at most STEP_S until the worker has read this."""
    note.touch()
    deadline = time.monotonic() + STEP_S
    while note.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    note.unlink(missing_ok=True)


def _stop_one(stack: Stack, name: str) -> None:
    stack.freeze(name)
    try:
        before = stack.holder(name, with_blocks=True)
        _wait_taken(stack, list(before.own))
    except KeyError:  # its lease has already expired, and it is about to register again
        return
    finally:
        stack.thaw(name)
    with contextlib.suppress(AssertionError):  # if the store itself was late, the worker continues unfenced
        stack.wait_registered(name, before.epoch, RENEWED_S)


def _wait_taken(stack: Stack, refs: Sequence[BlockRef]) -> None:
    """Waits until at least half of these blocks have a new generation in the header, which their new writers record
    before they store. Waits for at most MOST_STOPPED_S or, if there are no blocks, for two leases.
    """
    deadline = time.monotonic() + (MOST_STOPPED_S if refs else 2 * LEASE_S)
    while time.monotonic() < deadline:
        time.sleep(0.01)
        taken = sum(int(stack.arena.generations[ref.block]) != ref.generation for ref in refs)
        if refs and 2 * taken >= len(refs):
            return


def victims(stack: Stack) -> int:
    """Returns the number of sequences whose blocks the reader rule found stale, or which a fenced worker aborted."""
    return _count(stack, DETECTED) + _count(stack, SENT_AWAY)


def _count(stack: Stack, pattern: str) -> int:
    """Returns the sum of the numbers that the pattern matches. A match without a number counts as one."""
    return sum(int(next(filter(None, match.groups()), 1)) for _, match in stack.lines(pattern))
