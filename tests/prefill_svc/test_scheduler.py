"""Prefill scheduling: order, budget, all-or-nothing admission."""

from __future__ import annotations

import pytest

from common.errors import ResourceExhausted
from common.types import Branch, SamplingParams, StoppingParams
from engine.sequence import Sequence
from prefill_svc.job import Job
from prefill_svc.scheduler import PrefillScheduler


def job(num_tokens: int, priority: int = 0) -> Job:
    return Job([Sequence([1] * num_tokens, [], SamplingParams(), StoppingParams())], priority)


def scheduler(budget: int = 64, max_num_seqs: int = 8, max_queue: int = 8) -> PrefillScheduler:
    return PrefillScheduler(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_queue=max_queue)


def run(target: PrefillScheduler) -> list[tuple[Job, int]]:
    """Plans and executes a step. Returns the number of computed tokens of each job."""
    plan = [(item, chunk.num_tokens) for item, chunk in target.plan(lambda _: True)]
    for item, num_tokens in plan:
        item.trunk.num_computed += num_tokens
        if item.trunk.num_computed == item.trunk.num_tokens:
            assert target.remove(item)
    return plan


def test_long_prompts_are_chunked_and_short_ones_fill_the_rest_of_the_budget() -> None:
    target, long, short = scheduler(), job(100), job(20)
    target.add(long)
    target.add(short)
    assert run(target) == [(long, 64)]
    assert run(target) == [(long, 36), (short, 20)]
    assert target.idle


def test_first_come_first_served_within_a_priority() -> None:
    target = scheduler(budget=10)
    jobs = [job(10, 1), job(10, 0), job(10, 1), job(10, 0)]
    for item in jobs:
        target.add(item)
    assert [run(target)[0][0] for _ in jobs] == [jobs[1], jobs[3], jobs[0], jobs[2]]


def test_nobody_overtakes_a_head_that_waits_for_blocks() -> None:
    target, big, small = scheduler(), job(60), job(1)
    target.add(big)
    target.add(small)
    assert target.plan(lambda item: item is small) == []
    assert target.num_waiting == 2
    assert [item for item, _ in target.plan(lambda _: True)] == [big, small]


def test_nobody_overtakes_a_running_prompt_that_waits_for_blocks() -> None:
    """Otherwise, short prompts could take all blocks for which it waits."""
    target, long, short = scheduler(budget=40), job(60), job(1)
    target.add(long)
    assert run(target) == [(long, 40)]
    target.add(short)
    assert target.plan(lambda _: True, lambda chunk: chunk.sequence is not long.trunk) == []
    assert target.give_way() is None and target.give_way(even_alone=True) is long
    long.start_over()
    assert [item for item, _ in target.plan(lambda _: True)] == [long], "back in its place"


def test_a_prompt_that_gets_no_block_in_its_first_step_keeps_others_from_being_admitted() -> None:
    target, jobs = scheduler(), [job(20), job(20), job(20)]
    for item in jobs:
        target.add(item)
    plan = target.plan(lambda _: True, lambda chunk: chunk.sequence is jobs[0].trunk)
    assert [item for item, _ in plan] == jobs[:1] and target.num_waiting == 1


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    target = scheduler(max_queue=2)
    target.add(job(1))
    target.add(job(1))
    with pytest.raises(ResourceExhausted) as error:
        target.add(job(1))
    assert error.value.retry_after_s


def test_cancelled_jobs_leave_the_queue_and_say_whether_they_hold_blocks() -> None:
    target, first, second = scheduler(budget=4), job(8), job(8)
    target.add(first)
    target.add(second)
    target.plan(lambda _: True)
    assert target.remove(second) is False
    assert target.remove(first) is True
    assert target.idle
    assert target.load().num_waiting == 0


def test_cancelled_jobs_do_not_pile_up_behind_a_head_that_waits() -> None:
    target = scheduler(max_queue=8)
    target.add(job(8))
    kept = job(8)
    target.add(kept)
    for _ in range(100):
        target.add(cancelled := job(8))
        assert target.plan(lambda _: False) == []
        target.remove(cancelled)
    assert len(target._waiting) <= 4 and target.num_waiting == 2
    assert [item for item, _ in target.plan(lambda _: True)][-1] is kept


def test_load_counts_tokens_not_yet_computed() -> None:
    target = scheduler(budget=10)
    target.add(job(30))
    target.add(job(5))
    run(target)
    load = target.load()
    assert (load.num_running, load.num_waiting, load.waiting_tokens) == (1, 1, 25)


def test_at_most_max_num_seqs_run() -> None:
    target = scheduler(max_num_seqs=2)
    for _ in range(3):
        target.add(job(4))
    assert len(target.plan(lambda _: True)) == 2


def group(num_prompt: int, *num_outputs: int) -> Job:
    """Returns branches with these numbers of output tokens, all different."""
    branches = [Branch(i, tuple(range(100 * i, 100 * i + n))) for i, n in enumerate(num_outputs)]
    return Job.of([1] * num_prompt, branches, SamplingParams(num_sequences=len(branches)), StoppingParams())


def test_samples_take_a_place_each_and_their_prompt_is_computed_once() -> None:
    target, many, one = scheduler(max_num_seqs=4), group(10, 0, 0, 0, 0), job(10)
    target.add(many)
    target.add(one)
    load = target.load()
    assert (load.num_waiting, load.waiting_tokens) == (5, 20)
    assert run(target) == [(many, 10)], "no place is left for the other"
    assert run(target) == [(one, 10)]


def test_branches_begin_once_the_trunk_is_computed() -> None:
    target, some = scheduler(budget=40), group(48, 5, 6, 7)
    for branch in some.sequences[1:]:
        branch.num_computed = 48  # as set by admission: they share the trunk's three full blocks
    target.add(some)
    chunks: list[list[tuple[int, int]]] = []
    while not target.idle:
        plan = target.plan(lambda _: True)
        chunks.append([(some.sequences.index(chunk.sequence), chunk.num_tokens) for _, chunk in plan])
        for _, chunk in plan:
            chunk.sequence.num_computed = chunk.end
        if all(s.num_computed == s.num_tokens for s in some.sequences):
            target.remove(some)
    assert chunks == [[(0, 40)], [(0, 13), (1, 6), (2, 7)]]


def test_of_prompts_that_cannot_grow_the_last_one_gives_way_and_keeps_its_place() -> None:
    target, first, second, third = scheduler(), job(100), job(100), job(100)
    for item in (first, second, third):
        target.add(item)
    assert target.give_way() is None, "none is running"
    assert run(target) == [(first, 64)] and target.give_way() is None, "nobody else could use its blocks"
    assert run(target) == [(first, 36), (second, 28)] and run(target) == [(second, 64)]
    assert run(target) == [(second, 8), (third, 56)]
    fourth = job(20)
    target.add(fourth)
    assert [item for item, _ in target.plan(lambda _: True)] == [third, fourth]
    assert target.plan(lambda _: True, lambda _: False) == [] and target.give_way() is fourth
    assert target.num_waiting == 1 and [item for item, _ in target.plan(lambda item: item is fourth)] == [third, fourth]
