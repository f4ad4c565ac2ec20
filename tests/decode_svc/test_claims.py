"""A group whose ticket cannot be claimed yet: what is cancelled meanwhile never runs, and nothing of it stays held."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from common.types import SamplingParams, StoppingParams
from decode_svc.outputs import Rejection
from decode_svc.scheduler import Group
from decode_svc.testing import DecodeBench
from engine.oracle import Oracle

PROMPT = list(range(20, 30))
SAMPLED = SamplingParams(temperature=1.5, seed=11, num_sequences=3)
STOPPING = StoppingParams(max_tokens=8, min_tokens=8)
Leave = Callable[[DecodeBench, Group], object]
LEAVES: dict[str, Leave] = {
    "cancelled": lambda bench, group: bench.worker.cancel(bench.inbox.session, group.handle),
    "session closed": lambda bench, group: bench.worker.close(bench.inbox.session),
    "sent away": lambda bench, group: bench.worker.reject_all(Rejection.DRAINING),
}


def waiting(bench: DecodeBench) -> Group:
    """Submitted while the ledger is silent."""
    bench.held.holder.breaker.open("a test")
    group = bench.submit(1, PROMPT, SAMPLED, STOPPING)
    assert not group.live and bench.worker.step() is not None, "it waits, and is asked for again"
    assert bench.worker.load.num_waiting == 3
    return group


@pytest.mark.parametrize("how", LEAVES)
@pytest.mark.parametrize("answers_before", [False, True], ids=["silent", "answers"])
def test_who_leaves_while_the_claim_waits_holds_nothing(small: DecodeBench, how: str, answers_before: bool) -> None:
    group = waiting(small)
    if answers_before:
        small.held.holder.probe()
    LEAVES[how](small, group)
    assert 1 not in small.inbox.session.groups
    small.held.holder.probe()
    assert small.worker.step() is None, "nothing is left to do"
    assert small.worker.load.num_waiting == 0 and small.held.num_held == 0
    assert not group.live, "it never ran"
    small.held.alloc(1)
    small.held.release(list(small.held._counts))
    small.held.assert_idle()


def test_a_sample_cancelled_while_the_claim_waits_is_not_decoded(small: DecodeBench) -> None:
    judge = Oracle(small.runner)
    expected = [judge.generate(PROMPT, SAMPLED, STOPPING, sample_index=index) for index in range(3)]
    waiting(small)
    small.worker.cancel(small.inbox.session, 1, 1)
    small.held.holder.probe()
    small.run()
    found = small.inbox.ids(1)
    assert found[0] == expected[0] and found[2] == expected[2]
    assert len(found.get(1, [])) <= 1, "what prefill drew"


def test_every_sample_cancelled_while_the_claim_waits(small: DecodeBench) -> None:
    waiting(small)
    for index in range(3):
        small.worker.cancel(small.inbox.session, 1, index)
    small.held.holder.probe()
    small.run(max_steps=5)
    assert small.held.num_held == 0 and 1 not in small.inbox.session.groups


def test_a_deadline_that_ends_while_the_claim_waits(small: DecodeBench) -> None:
    group = waiting(small)
    group.deadline_ns = time.monotonic_ns()
    small.worker.step()
    assert small.inbox.rejections == {1: Rejection.DEADLINE}
    small.held.holder.probe()
    assert small.worker.step() is None and small.held.num_held == 0


def test_a_claim_that_waits_is_made_once_the_ledger_answers(small: DecodeBench) -> None:
    judge = Oracle(small.runner)
    expected = {index: judge.generate(PROMPT, SAMPLED, STOPPING, sample_index=index) for index in range(3)}
    waiting(small)
    small.held.holder.probe()
    small.run()
    assert small.inbox.ids(1) == expected


def test_a_second_submission_while_the_first_claim_waits_comes_after_it(small: DecodeBench) -> None:
    first = waiting(small)
    second = small.submit(2, PROMPT, replace(SAMPLED, num_sequences=1), STOPPING)
    small.held.holder.probe()
    small.worker.step()
    assert first.number < second.number and first.live and second.live
    small.run()
