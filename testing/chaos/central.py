"""Scenarios that kill the only block store or the only gateway with SIGKILL under load. The death of the store must not
affect any request. The death of the gateway may break only its connections. The new gateway listens on the same ports
and finds the blocks of earlier prompts, and the workers release the blocks of the lost requests.
"""

from __future__ import annotations

import contextlib
import random
import time
import urllib.request
from collections.abc import Sequence

from block_store.ledger.invariants import check_running
from looseleaf.client import Client
from testing.chaos.report import Report, percentile
from testing.chaos.run import Run, judge
from testing.chaos.stack import BACK_S, Plan, Stack
from testing.chaos.traffic import Answer, Traffic
from testing.system import assert_nothing_held, inspect, wait_for

BACK_MOST_S = 3.0
RECONNECT_S = 5.0
"""The time in seconds within which every client should have connected to the new gateway. A gRPC client waits at most
about 1 s between two attempts (`common.rpc`).
"""
_WARM_PROMPT = [17 + number % 200 for number in range(160)]


def store_kill(run: Run) -> Report:
    """Kills the store in each trial. In every second trial, also kills a decode worker, whose successor must find the
    new store.
    """
    with run.stack(Plan()) as stack:
        return store_kill_on(run, stack)


def store_kill_on(run: Run, stack: Stack) -> Report:
    """Runs `store_kill` on an existing stack."""
    report, rng = run.report("store-kill"), run.rng
    before, kills, back = stack.arena.fixed, list[float](), list[float]()
    with run.traffic(stack) as traffic:
        traffic.wait_for(run.concurrency, timeout_s=120)
        for trial in range(run.trials):
            kill, store_back = _kill_store(stack, rng, with_decode=trial % 2 == 1)
            kills.append(kill)
            back.append(store_back - kill)
            traffic.wait_for(len(traffic.answers) + run.concurrency, timeout_s=120)
        answers = traffic.stop()
    judge(report, stack, answers)
    gaps = _gaps(answers, kills)
    report.told("longest gap p50, p99 of those in flight at a kill", _two(gaps))
    report.told("store back, p50, most", f"{percentile(back, 0.5):.2f} s, {max(back):.2f} s")
    after = stack.arena.fixed
    report.none("rebuilt ledgers", int(after.dataset != before.dataset or after.is_lost), 1, "looks")
    _tell_ledger(report, stack)
    return report


def _kill_store(stack: Stack, rng: random.Random, *, with_decode: bool) -> tuple[float, float]:
    """Kills the store. With `with_decode`, also kills a decode worker, and waits until its successor gets requests.
    Returns the time of the kill, and the time at which a store answered again.
    """
    time.sleep(rng.random() * 0.3)
    pid, decode, dead = stack.pids["block_store"], stack.pids["decode-0"], stack.holder("decode-0")
    moment = stack.kill("block_store")
    if with_decode:
        stack.kill("decode-0")
    wait_for(lambda: stack.pids["block_store"], lambda now: now != pid, BACK_S, "the store is not started again")
    wait_for(lambda: _num_blocks(stack), bool, BACK_S, "the store does not answer at its address")
    back = time.monotonic()
    if with_decode:
        stack.wait_back("decode-0", decode, dead.epoch)
    return moment, back


def _num_blocks(stack: Stack) -> int:
    with contextlib.suppress(Exception):  # the store may not be ready yet, and the error may be of any kind
        return inspect(stack.addresses.block_store).num_blocks
    return 0


def gateway_kill(run: Run) -> Report:
    """Kills the gateway during streams."""
    with run.stack(Plan()) as stack:
        return gateway_kill_on(run, stack)


def gateway_kill_on(run: Run, stack: Stack) -> Report:
    """Runs `gateway_kill` on an existing stack."""
    report, rng = run.report("gateway-kill"), run.rng
    _cached(stack)  # caches the prompt's blocks
    outages, cached = list[tuple[float, float]](), list[int]()
    with run.traffic(stack) as traffic:
        traffic.wait_for(run.concurrency, timeout_s=120)
        for _ in range(run.trials):
            time.sleep(rng.random() * 0.3)
            outages.append(_kill_gateway(stack))
            cached.append(_cached(stack))
            _wait_complete(traffic, traffic.num_complete + run.concurrency)
        answers = traffic.stop()
    broken = [answer for answer in answers if _is_broken(answer, outages)]
    judge(report, stack, [answer for answer in answers if answer not in broken])
    report.none("wrong tokens before a connection broke", sum(not a.right for a in broken), len(broken), "requests")
    back = [back - kill for kill, back in outages]
    report.told("gateway ready again, p50", f"{percentile(back, 0.5):.2f} s")
    report.at_most("gateway ready again, most", max(back), BACK_MOST_S, "s")
    report.at_least("cached tokens of a prompt from before, least", min(cached), len(_WARM_PROMPT) - 16, "tokens")
    _tell_ledger(report, stack)
    return report


def _wait_complete(traffic: Traffic, count: int) -> None:
    wait_for(lambda: traffic.num_complete, lambda found: found >= count, 120.0, "requests do not complete")


def _kill_gateway(stack: Stack) -> tuple[float, float]:
    """Kills the gateway. Returns the time of the kill, and the time at which it was ready again at its address."""
    moment = stack.kill("gateway")
    wait_for(lambda: _is_ready(stack), bool, BACK_S, "the gateway is not ready again at its address")
    return moment, time.monotonic()


def _is_ready(stack: Stack) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{stack.addresses.http}/health", timeout=5.0):
        return True
    return False


def _cached(stack: Stack) -> int:
    """Sends a fixed prompt. Returns the number of its tokens that were cached."""
    with Client(stack.addresses.grpc, timeout=60.0) as client:
        return client.generate(_WARM_PROMPT, max_tokens=1, temperature=0.0).usage.cached_tokens


def _is_broken(answer: Answer, outages: Sequence[tuple[float, float]]) -> bool:
    """Returns whether the request failed, and overlapped with an outage or the RECONNECT_S seconds after it."""
    return answer.error is not None and any(
        answer.began < back + RECONNECT_S and kill < answer.ended for kill, back in outages
    )


def _tell_ledger(report: Report, stack: Stack) -> None:
    try:
        assert_nothing_held(stack.addresses.block_store)
        held = 0
    except AssertionError as still:
        held = 1
        report.told("  first line of the error", str(still).splitlines()[0][:100])
    report.none("blocks that stay held at the end", held, 1, "looks")
    report.none("broken invariants at the end", len(check_running(stack.ledger())), 1, "looks")


def _gaps(answers: Sequence[Answer], kills: Sequence[float]) -> list[float]:
    streamed = [answer for answer in answers if answer.case.streamed]
    return [answer.longest_gap_s for answer in streamed if any(answer.spans(kill) for kill in kills)]


def _two(values: Sequence[float]) -> str:
    return f"{percentile(values, 0.5):.2f} s, {percentile(values, 0.99):.2f} s"
