"""Scenarios that disturb Redis under load: it is killed and restarted empty, flushed, frozen, slowed down, or restarted
with older data. No process may end. Requests may wait, and at most a share MOST_FAILED of them may fail. Within WHOLE_S
of Redis' return, all invariants must hold again, and every worker must have a lease.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

from block_store.ledger.invariants import check_running
from testing.chaos.report import Report, percentile
from testing.chaos.run import Run, judge
from testing.chaos.stack import Stack
from testing.chaos.traffic import Answer

FROZEN_S = 10.0
DOWN_S = 1.0
"""The time in seconds for which a killed Redis stays down."""
SLOW_S = 10.0
STALLS_S = (0.02, 0.3)
"""The shortest and longest stall of a slow Redis, in seconds. The longest exceeds the budget of a worker's call."""
PAUSES_S = (0.005, 0.05)
"""The shortest and longest pause between two stalls, in seconds."""
OLD_S = 2.0
"""The time in seconds between the snapshot and the kill, in which the ledger changes."""
WHOLE_S = 10.0
POLL_S = 0.1
MOST_FAILED = 0.001
WITHOUT = r"(prefill|decode)-\d continues without the ledger"
WORKERS = frozenset({"prefill-0", "prefill-1", "decode-0", "decode-1"})


def killed(run: Run) -> Report:
    """Kills Redis with SIGKILL and starts it again, empty."""
    return _scenario(run, "redis-killed", _kill)


def flushed(run: Run) -> Report:
    """Deletes all data in Redis (FLUSHALL)."""
    return _scenario(run, "redis-flushed", flush)


def flush(stack: Stack) -> None:
    stack.redis.flush()


def frozen(run: Run) -> Report:
    """Stops Redis for 10 s. Redis keeps its data."""
    return _scenario(run, "redis-frozen", _freeze)


def slow(run: Run) -> Report:
    """Stalls Redis repeatedly for 10 s, as if other processes used its core, memory or disk."""
    return _scenario(run, "redis-slow", partial(_stall, rng=run.rng))


def older(run: Run) -> Report:
    """Kills Redis and starts it again with an earlier snapshot."""
    return _scenario(run, "redis-older", _restore)


def _kill(stack: Stack) -> None:
    stack.redis.kill()
    time.sleep(DOWN_S)
    stack.redis.start_empty()


def _freeze(stack: Stack) -> None:
    stack.redis.freeze()
    time.sleep(FROZEN_S)
    stack.redis.thaw()


def _stall(stack: Stack, rng: random.Random) -> None:
    ends = time.monotonic() + SLOW_S
    while time.monotonic() < ends:
        stack.redis.freeze()
        time.sleep(rng.uniform(*STALLS_S))
        stack.redis.thaw()
        time.sleep(rng.uniform(*PAUSES_S))


def _restore(stack: Stack) -> None:
    snapshot = stack.redis.snapshot("older.rdb")
    time.sleep(OLD_S)
    stack.redis.kill()
    time.sleep(DOWN_S)
    stack.redis.start_from(snapshot)


def _scenario(run: Run, name: str, lose: Callable[[Stack], None]) -> Report:
    with run.stack() as stack:
        return outage_on(run, stack, name, lose)


def outage_on(run: Run, stack: Stack, name: str, lose: Callable[[Stack], None]) -> Report:
    """Disturbs Redis `trials` times under load on an existing stack. `lose` disturbs Redis, and returns when Redis can
    answer again.
    """
    report, rng, pids, took = run.report(name), run.rng, stack.pids, list[float]()
    with run.traffic(stack) as traffic:
        traffic.wait_for(run.concurrency, timeout_s=120)
        for _ in range(run.trials):
            time.sleep(0.5 + rng.random())
            lose(stack)
            took.append(_whole_after(stack))
            traffic.wait_for(len(traffic.answers) + run.concurrency, timeout_s=120)
        answers = traffic.stop()
    judge(report, stack, answers, most_failed=MOST_FAILED)
    report.told("longest gap p50, p99", f"{_gap(answers, 0.5):.2f} s, {_gap(answers, 0.99):.2f} s")
    report.told("workers continued without the ledger", f"{len(stack.lines(WITHOUT))} times")
    ended = sum(stack.pids[service] != pid for service, pid in pids.items())
    report.none("processes that ended", ended, run.trials * len(pids), "times")
    report.at_most("ledger whole after, most", max(took), WHOLE_S, "s")
    left = check_running(stack.ledger())
    report.none("broken invariants at the end", len(left), 1, "looks")
    for finding in left[:3]:
        report.told("  finding", finding[:100])
    return report


def _gap(answers: Sequence[Answer], share: float) -> float:
    return percentile([answer.longest_gap_s for answer in answers if answer.case.streamed], share)


def _whole_after(stack: Stack) -> float:
    """Returns the seconds until the ledger is consistent, or infinity if that takes more than 3 * WHOLE_S."""
    began = time.monotonic()
    while time.monotonic() < began + 3 * WHOLE_S:
        if _is_whole(stack):
            return time.monotonic() - began
        time.sleep(POLL_S)
    return float("inf")


def _is_whole(stack: Stack) -> bool:
    try:
        leased = {holder.name for holder in stack.inspect().holders}
        return leased >= WORKERS and not check_running(stack.ledger())
    except Exception:  # the ledger is not ready yet; the error may be of any kind
        return False
