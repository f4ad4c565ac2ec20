"""Groups whose tickets cannot be claimed yet. A group that is cancelled while it waits never runs and holds
no blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from block_store.ledger.prefix_hash import chain_start, next_hash
from common.types import SamplingParams, StoppingParams
from decode_svc.outputs import Rejection, timings_of
from decode_svc.scheduler import Group
from engine.model_runner import ModelRunner
from testing.decode import DOMAIN, DecodeBench
from testing.ledger.store import indexed
from testing.oracle import Oracle

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
    """A group that was submitted while the ledger does not answer."""
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
        small.held.holder.lease.probe()
    LEAVES[how](small, group)
    assert 1 not in small.inbox.session.groups
    small.held.holder.lease.probe()
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
    small.held.holder.lease.probe()
    small.run()
    found = small.inbox.ids(1)
    assert found[0] == expected[0] and found[2] == expected[2]
    assert len(found.get(1, [])) <= 1, "what prefill drew"


def test_every_sample_cancelled_while_the_claim_waits(small: DecodeBench) -> None:
    waiting(small)
    for index in range(3):
        small.worker.cancel(small.inbox.session, 1, index)
    small.held.holder.lease.probe()
    small.run(max_steps=5)
    assert small.held.num_held == 0 and 1 not in small.inbox.session.groups


def test_a_deadline_that_ends_while_the_claim_waits(small: DecodeBench) -> None:
    group = waiting(small)
    group.deadline_ns = time.monotonic_ns()
    small.worker.step()
    assert small.inbox.rejections == {1: Rejection.DEADLINE}
    small.held.holder.lease.probe()
    assert small.worker.step() is None and small.held.num_held == 0


def test_a_claim_that_waits_is_made_once_the_ledger_answers(small: DecodeBench) -> None:
    judge = Oracle(small.runner)
    expected = {index: judge.generate(PROMPT, SAMPLED, STOPPING, sample_index=index) for index in range(3)}
    waiting(small)
    small.held.holder.lease.probe()
    small.run()
    assert small.inbox.ids(1) == expected


def test_a_second_submission_while_the_first_claim_waits_comes_after_it(small: DecodeBench) -> None:
    first = waiting(small)
    second = small.submit(2, PROMPT, replace(SAMPLED, num_sequences=1), STOPPING)
    small.held.holder.lease.probe()
    small.worker.step()
    assert first.number < second.number and first.live and second.live
    small.run()


def test_blocks_that_decode_fills_are_found_under_the_salt_that_came_with_the_ticket(small: DecodeBench) -> None:
    """The salt is the tenant's. Prefill hashed the head of the prompt with the same salt."""
    made = small.prefilled(1, PROMPT, replace(SAMPLED, num_sequences=1), STOPPING)
    small.worker.submit(small.inbox.session, made.group, made.ticket, b"tenant", made.candidates)
    [sequence] = made.group.live
    small.run()
    tokens, hashes = [*PROMPT, *small.inbox.ids(1)[0]], [chain_start(DOMAIN, b"tenant")]
    for first in range(0, len(tokens) - small.block_size, small.block_size):
        hashes.append(next_hash(hashes[-1], tokens[first : first + small.block_size]))
    filled = hashes[1 + len(PROMPT) // small.block_size]
    assert indexed(small.held.holder.ledger, [[filled]]) == 1
    assert sequence.hashes[: len(hashes)] == hashes[: len(sequence.hashes)]


def test_many_short_groups_start_beside_a_long_one(
    small_runner: ModelRunner, redis_client: Any, tmp_path: Path
) -> None:
    """Blocks that are reserved for one step are not reserved in the next one."""
    bench = DecodeBench(small_runner, tmp_path, redis_client, num_blocks=48)
    long = bench.submit(0, PROMPT[:4], replace(SAMPLED, num_sequences=1), StoppingParams(100, 100))
    bench.worker.step()
    for handle in range(1, 26):
        bench.submit(handle, PROMPT[:4], replace(SAMPLED, num_sequences=1), StoppingParams(3, 3))
        for _ in range(3):
            bench.worker.step()
        assert handle not in bench.inbox.session.groups, "it is done"
    assert long.live
    bench.worker.cancel(bench.inbox.session, 0)
    bench.close()


def test_times_of_a_group_that_ends() -> None:
    group = Group(1, 1, [], arrived_ns=time.monotonic_ns() - 5_000_000_000)
    group.claimed_ns = group.arrived_ns + 2_000_000_000
    timings = timings_of(group)
    assert timings.hand_over_ns == 2_000_000_000 and 2.9e9 < timings.decode_ns < 60e9


def test_without_the_ledger_groups_that_need_no_block_run_beside_one_that_gets_none(
    ordinary_runner: ModelRunner, redis_client: Any, tmp_path: Path
) -> None:
    bench = DecodeBench(ordinary_runner, tmp_path, redis_client, reserve=3)
    wide, long = replace(SAMPLED, num_sequences=8), StoppingParams(max_tokens=100)
    bench.submit(1, list(range(5, 18)), wide, long)
    bench.submit(2, list(range(30, 47)), SamplingParams(temperature=0.0), long)
    bench.worker.step()
    bench.held.top_up()
    bench.held.holder.breaker.open("a test")
    for _ in range(200):
        bench.worker.step()
    waiting, running = bench.inbox.ids(1), bench.inbox.ids(2)
    assert 0 < len(waiting[0]) < len(running[0]) < 100, "it ends where it needs a block"
    assert bench.held.num_reserved < 8
    bench.held.holder.lease.probe()
    bench.run()
    assert len(bench.inbox.ids(1)[0]) == len(bench.inbox.ids(2)[0]) == 100
    bench.held.give_up_reserve()
    bench.close()


def test_a_drain_waits_for_a_group_that_was_accepted_a_moment_ago(small: DecodeBench) -> None:
    small.submit(1, PROMPT, SAMPLED, STOPPING)
    assert small.worker.load.num_running + small.worker.load.num_waiting == 3
    small.run()
