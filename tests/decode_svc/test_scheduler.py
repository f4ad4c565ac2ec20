"""Decode scheduling: continuous batching, admission, victims of preemption, order of resumption."""

from __future__ import annotations

from common.types import SamplingParams, StoppingParams
from decode_svc.scheduler import DecodeScheduler, Group
from engine.sequence import Sequence


def group(handle: int, priority: int = 0, samples: int = 1, deadline_ns: int | None = None) -> Group:
    sequences = [Sequence([1], [2], SamplingParams(), StoppingParams(), index) for index in range(samples)]
    result = Group(handle, 0, sequences, priority=priority, deadline_ns=deadline_ns)
    result.live = list(sequences)
    return result


def scheduler(*groups: Group, max_num_seqs: int = 4, max_queue: int = 4) -> DecodeScheduler:
    result = DecodeScheduler(max_num_seqs=max_num_seqs, max_queue=max_queue)
    for item in groups:
        result.add(item)
    return result


def test_groups_start_in_order_of_priority_then_arrival() -> None:
    late, early, urgent = group(1), group(2), group(3, priority=-1)
    target = scheduler(late, early, urgent, max_num_seqs=2)
    target.admit(lambda _: True)
    assert [g.handle for g in target.running] == [3, 1]


def test_a_group_starts_as_a_whole() -> None:
    target = scheduler(group(1, samples=3), group(2, samples=2), group(3), max_num_seqs=4)
    target.admit(lambda _: True)
    assert [g.handle for g in target.running] == [1]
    assert target.load().num_running == 3
    assert target.load().num_waiting == 3


def test_nobody_overtakes_a_group_that_does_not_fit() -> None:
    first, second = group(1), group(2)
    target = scheduler(first, second)
    target.admit(lambda item: item is second)
    assert target.running == []


def test_the_victim_is_the_latest_of_the_lowest_priority_and_never_the_last_one_left() -> None:
    urgent, old, new = group(1, priority=-1), group(2), group(3)
    target = scheduler(old, new, urgent)
    target.admit(lambda _: True)
    assert target.victim() is new
    target.remove(new)
    assert target.victim() is old
    target.remove(old)
    assert target.victim() is None


def test_waiting_groups_are_victims_before_running_ones_that_came_earlier() -> None:
    running, waiting = group(1), group(2)
    target = scheduler(running, waiting, max_num_seqs=1)
    target.admit(lambda _: True)
    assert target.victim() is waiting


def test_deadlines() -> None:
    item = group(1, deadline_ns=100)
    target = scheduler(item, group(2))
    assert target.expired(99) == []
    assert target.expired(100) == [item]


def test_the_queue_is_bounded() -> None:
    target = scheduler(max_num_seqs=2, max_queue=1)
    for handle in range(3):
        assert not target.is_full()
        target.add(group(handle))
    assert target.is_full()
    target.admit(lambda _: True)
    assert target.is_full()
    target.remove(target.running[0])
    assert not target.is_full()


def test_the_preempted_go_on_before_new_ones_start() -> None:
    old, new, waiting = group(1), group(2), group(3)
    target = scheduler(old, new, waiting, max_num_seqs=2)
    target.admit(lambda _: True)
    target.preempt(new)
    target.admit(lambda _: True)
    assert target.running == [old] and target.resumable() is new
    assert target.load().num_preempted == 1 and target.load().num_waiting == 1
    target.resume(new)
    assert target.running == [old, new] and target.resumable() is None
    target.remove(old)
    target.admit(lambda _: True)
    assert target.running == [new, waiting]


def test_a_group_preempted_before_it_ran_keeps_its_turn() -> None:
    early, late = group(1), group(2)
    target = scheduler(early, late)
    target.preempt(late)
    assert target.resumable() is None
    target.admit(lambda _: True)
    assert target.running == [early] and target.resumable() is late


def test_preempted_groups_are_resumed_in_order_and_as_a_whole() -> None:
    first, wide, narrow = group(1), group(2, samples=3), group(3)
    target = scheduler(first, wide, narrow, max_num_seqs=5)
    target.admit(lambda _: True)
    target.preempt(narrow)
    target.preempt(wide)
    other = group(4, priority=-1, samples=2)
    target.add(other)
    assert target.resumable() is None  # the urgent group is first
    target.admit(lambda _: True)
    assert target.running == [other, first]
    assert target.resumable() is None  # `wide` does not fit, and `narrow` does not overtake it
    target.remove(first)
    assert target.resumable() is wide


def test_preempted_groups_count_as_queued_and_expire() -> None:
    target = scheduler(max_num_seqs=1, max_queue=1)
    item = group(1, deadline_ns=5)
    target.add(item)
    target.admit(lambda _: True)
    assert not target.is_full()
    target.preempt(item)
    assert not target.is_full() and not target.idle
    target.add(group(2))
    assert target.is_full()
    assert target.expired(5) == [item]
    target.remove(item)
    assert target.load().num_preempted == 0


def test_lower_priorities_make_way_in_a_step_if_that_is_enough() -> None:
    kept, low, lower = group(1), group(2, priority=1), group(3, priority=2)
    target = scheduler(kept, low, lower, max_num_seqs=3)
    target.admit(lambda _: True)
    too_wide = group(4, samples=3)
    target.add(too_wide)
    assert target.in_the_way() is None
    target.remove(too_wide)
    target.add(urgent := group(5, samples=2))
    assert target.in_the_way() is lower
    target.preempt(lower)
    assert target.in_the_way() is low
    target.preempt(low)
    assert target.in_the_way() is None
    target.admit(lambda _: False)  # the head does not fit, and no group has a lower priority
    assert target.running == [kept]
    target.admit(lambda _: True)
    assert target.running == [kept, urgent]


def test_who_outranks_a_running_group_need_not_fit() -> None:
    low, urgent = group(1, priority=1), group(2)
    target = scheduler(low)
    target.admit(lambda _: True)
    target.add(urgent)
    target.admit(lambda _: False)
    assert target.running == [urgent, low]
