"""The chaos suite at its smallest size, and tests that its checks can fail. `make chaos` runs the whole suite."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testing.chaos import garbled, kills, outages
from testing.chaos.run import Run, judge
from testing.chaos.stack import Stack

pytestmark = pytest.mark.chaos


def test_without_faults_every_answer_is_the_oracles_and_a_wrong_token_would_be_seen(run: Run, stack: Stack) -> None:
    with run.traffic(stack) as traffic:
        traffic.wait_for(40, timeout_s=600)
        answers = traffic.stop()
    judge(report := run.report("none"), stack, answers)
    assert report.good and len(answers) >= 40, report.text()

    case = run.book[0]
    *rest, last = case.expected[-1]
    wrong = replace(case, expected=(*case.expected[:-1], (*rest, last + 1)))
    with replace(run, book=[wrong, *run.book[1:]]).traffic(stack) as traffic:
        traffic.wait_for(40, timeout_s=600)
        answers = traffic.stop()
    judge(report := run.report("none"), stack, answers)
    assert not report.good and any(not answer.right for answer in answers)


def test_an_idle_worker_that_is_fenced_comes_back_by_itself(stack: Stack) -> None:
    for name in ("decode-0", "prefill-0"):
        before, pid = stack.holder(name), stack.pids[name]
        stack.ledger().unregister(before.epoch)
        stack.wait_registered(name, before.epoch, timeout_s=60)
        assert stack.pids[name] == pid


def test_a_killed_decode_worker_costs_no_token(run: Run, stack: Stack) -> None:
    report = kills.decode_kill_on(run, stack)
    assert report.good, report.text()


def test_a_flushed_redis_costs_no_request(run: Run, stack: Stack) -> None:
    report = outages.outage_on(run, stack, "redis-flushed", outages.flush)
    assert report.good, report.text()


def test_garbled_values_cost_no_token_and_no_process(run: Run, stack: Stack) -> None:
    report = garbled.garble_on(replace(run, trials=100), stack)
    assert report.good, report.text()
