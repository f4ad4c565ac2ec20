"""Cancellation of a job in each of its phases. It holds no blocks afterwards (the fixture asserts this), and other jobs
continue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from block_store.errors import LedgerUnavailable
from block_store.ledger.inspection import inspect
from common.errors import Internal
from common.types import Branch, SamplingParams, StoppingParams
from prefill_svc.events import ChunkDone, Done
from prefill_svc.job import Job

BLOCK = 16
PROMPT = list(range(10, 47))  # two full blocks and a partial one
OTHER = list(range(60, 97))
GREEDY = SamplingParams(temperature=0.0)
STOPPING = StoppingParams(max_tokens=60)
Make = Callable[..., Any]


def put(world: Any, prompt: list[int], num_branches: int = 1) -> tuple[Job, list[Any]]:
    branches = [Branch(index) for index in range(num_branches)]
    job, events = Job.of(prompt, branches, SamplingParams(temperature=0.0, num_sequences=num_branches), STOPPING), []
    world.worker.submit(job, b"", events.append)
    return job, events


def settle(world: Any) -> None:
    """Makes Redis answer again, and repeats the calls without an answer."""
    world.held.holder.lease.probe()
    world.held.release(world.held.alloc(1))


@pytest.mark.parametrize("num_branches", [1, 3])
def test_cancelled_while_its_hand_over_waits(make_world: Make, num_branches: int) -> None:
    world = make_world()
    job, events = put(world, PROMPT, num_branches)
    step = world.runner.step

    def silent(batch: Any) -> Any:
        world.held.holder.breaker.open("a test")
        return step(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.runner, "step", silent)
        world.worker.step()
    assert job in world.worker._parked and world.held.num_held == 3
    assert world.worker.step() is not None, "it is tried again"
    world.worker.cancel(job)
    assert world.held.num_held == 0
    settle(world)
    assert world.worker.step() is None and not any(isinstance(event, Done) for event in events)
    assert not [holder for holder in inspect(world.ledger).holders if holder.kind == "ticket"]
    done = world.prefill(PROMPT, [Branch()], GREEDY, STOPPING)
    assert done.ticket is not None and len(world.claim(done.ticket)) == 3


@pytest.mark.parametrize("num_answers", [0, 1], ids=["not made", "made, unheard"])
def test_cancelled_when_its_hand_over_got_no_answer(make_world: Make, num_answers: int) -> None:
    """The same prompt comes again immediately, and gets a new ticket."""
    world = make_world()
    job, events = put(world, PROMPT[:32])  # all its blocks are full, so the next job has the same blocks
    hand_over = world.held.holder.hand_over

    def unheard(*args: Any, **kwargs: Any) -> Any:
        if num_answers:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(world.held.holder.ledger, "_execute", lost(world.held.holder.ledger._execute))
                return hand_over(*args, **kwargs)
        raise LedgerUnavailable("a test")

    def lost(execute: Any) -> Any:
        def run(name: str, *args: Any) -> Any:
            answer = execute(name, *args)
            if name == "hand_over":
                raise LedgerUnavailable("the answer was lost")
            return answer

        return run

    world.held.holder.lane.budget_s = -1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.held.holder, "hand_over", unheard)
        world.worker.step()
    assert job in world.worker._parked
    world.worker.cancel(job)
    world.held.holder.lease.probe()
    done = world.prefill(PROMPT[:32], [Branch()], GREEDY, STOPPING)
    assert done.ticket is not None and len(world.claim(done.ticket)) == 2
    assert world.held.num_held == 0 and not any(isinstance(event, Done) for event in events)


def test_cancelled_while_it_waits_for_blocks(make_world: Make) -> None:
    """No job overtakes the head of the queue. When the head is cancelled, the next job runs."""
    world = make_world(num_blocks=7)
    taken = world.held.alloc(5)
    (head, _), (_, events) = put(world, PROMPT), put(world, OTHER[:20])
    world.worker.step()
    assert world.held.num_held == 5 and not events, "the head waits for three blocks, the other one behind it"
    world.worker.cancel(head)
    world.run(events)
    assert isinstance(events[-1], Done)
    world.claim(events[-1].ticket)
    world.held.release(taken)


def test_cancelled_between_two_chunks(make_world: Make) -> None:
    world = make_world(budget=20)
    (job, events), (_, others) = put(world, PROMPT), put(world, OTHER)
    world.worker.step()
    assert 0 < job.trunk.num_computed < len(PROMPT)
    assert events == [ChunkDone(job.trunk.num_computed)], "who waits hears of it"
    world.worker.cancel(job)
    world.run(others)
    world.claim(others[-1].ticket)
    assert not any(isinstance(event, Done) for event in events) and world.held.num_held == 0


def test_cancelled_before_its_turn(make_world: Make) -> None:
    world = make_world(max_num_seqs=1)
    (_, first), (job, events), (_, last) = put(world, PROMPT), put(world, OTHER), put(world, PROMPT[:20])
    world.worker.cancel(job)
    world.run(first, last)
    for heard in (first, last):
        world.claim(heard[-1].ticket)
    assert not events


def test_fenced_while_a_hand_over_waits(make_world: Make) -> None:
    """The client is told to retry, and the worker's next incarnation holds none of the blocks."""
    world = make_world()
    _, events = put(world, PROMPT)
    step = world.runner.step

    def silent(batch: Any) -> Any:
        world.held.holder.breaker.open("a test")
        return step(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.runner, "step", silent)
        world.worker.step()
    renewed: list[bool] = []
    world.worker._attached.renew = lambda: renewed.append(True)
    world.worker._attached.is_fenced = True
    world.worker.step()
    world.worker._attached.is_fenced = False
    assert renewed and isinstance(events[-1], Exception) and not world.worker._parked
    world.held.release_many([list(world.held._counts)])
    settle(world)


def test_a_job_that_fails_at_its_end_holds_nothing_and_another_one_of_its_step_is_handed_over(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    _, events = put(world, PROMPT)
    broken, broken_events = put(world, OTHER)
    append = world.worker._append

    def appending(sequence: Any, sampled: Any) -> Any:
        if sequence is broken.sequences[0]:
            raise RuntimeError("a defect")
        return append(sequence, sampled)

    monkeypatch.setattr(world.worker, "_append", appending)
    world.worker.step()
    assert isinstance(broken_events[-1], Internal) and isinstance(events[-1], Done)
    assert world.worker._scheduler.idle and world.held.num_held == 0
    assert len(world.claim(events[-1].ticket)) == 3
