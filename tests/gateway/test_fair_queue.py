"""Deficit round robin: equal shares over any interval, arrival order within a tenant, no lost requests."""

from __future__ import annotations

from collections import deque
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.fair_queue import FairQueue

Item = tuple[str, int, int]
"""(tenant, cost, number in the order of arrival)."""
COSTS = st.lists(st.integers(1, 300), min_size=1, max_size=12)
QUANTA = st.sampled_from([1, 7, 50, 100, 1000])


def filled(quantum: int, **costs: list[int]) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue(quantum)
    for tenant, all_costs in costs.items():
        for number, cost in enumerate(all_costs):
            queue.push(tenant, cost, (tenant, cost, number))
    return queue


def drained(queue: FairQueue[Item]) -> list[Item]:
    return [queue.pop() for _ in range(len(queue))]


def textbook(quantum: int, lines: dict[str, list[int]]) -> list[Item]:
    """Deficit round robin as in the paper, including rounds in which all queues are idle."""
    left = {t: deque((t, cost, number) for number, cost in enumerate(costs)) for t, costs in lines.items()}
    deficits = dict.fromkeys(left, 0)
    served: list[Item] = []
    while any(left.values()):
        for tenant, items in left.items():
            deficits[tenant] = deficits[tenant] + quantum if items else 0
            while items and items[0][1] <= deficits[tenant]:
                deficits[tenant] -= items[0][1]
                served.append(items.popleft())
    return served


@settings(max_examples=50)
@given(QUANTA, st.dictionaries(st.sampled_from("abcd"), COSTS, min_size=1))
def test_the_order_is_the_textbooks(quantum: int, lines: dict[str, list[int]]) -> None:
    assert drained(filled(quantum, **lines)) == textbook(quantum, lines)


@settings(max_examples=50)
@given(QUANTA, COSTS, COSTS)
def test_two_tenants_that_wait_share_any_stretch_of_time_equally(quantum: int, a: list[int], b: list[int]) -> None:
    served = drained(filled(quantum, flood=a * 10, other=b))
    ahead, largest = [0], max(a + b)
    for tenant, cost, number in served:  # while both tenants wait
        ahead.append(ahead[-1] + (cost if tenant == "flood" else -cost))
        if (tenant, number) in (("other", len(b) - 1), ("flood", len(a) * 10 - 1)):
            break
    # The lead between i and j is the difference of the two leads; half of it is the distance from an equal share.
    most = max(high - low for low, high in zip(accumulate(ahead, min), ahead, strict=True))
    least = min(low - high for high, low in zip(accumulate(ahead, max), ahead, strict=True))
    assert max(most, -least) / 2 <= quantum / 2 + largest


@settings(max_examples=50)
@given(QUANTA, COSTS, st.integers(0, 30), st.integers(1, 300))
def test_a_tenant_that_comes_late_waits_for_its_own_cost_and_not_for_the_flood(
    quantum: int, flood: list[int], before: int, cost: int
) -> None:
    queue = filled(quantum, flood=flood * 31)
    for _ in range(before):
        queue.pop()
    queue.push("late", cost, ("late", cost, 0))
    ahead = 0
    while (item := queue.pop())[0] != "late":
        ahead += item[1]
    assert ahead <= cost + 2 * quantum + max(flood)


@settings(max_examples=50)
@given(QUANTA, st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "discard", "head"]), st.integers(0, 99))))
def test_nothing_is_lost_or_reordered_and_the_head_stays(quantum: int, steps: list[tuple[str, int]]) -> None:
    queue: FairQueue[Item] = FairQueue(quantum)
    waiting: dict[str, list[Item]] = {tenant: [] for tenant in "abc"}
    told: Item | None = None
    for number, (step, value) in enumerate(steps):
        if step == "push":
            item = ("abc"[value % 3], 1 + value * 5, number)
            queue.push(item[0], item[1], item)
            waiting[item[0]].append(item)
        elif step == "discard" and (all_items := [item for items in waiting.values() for item in items]):
            item = all_items[value % len(all_items)]
            queue.discard(item[0], item)
            queue.discard(item[0], item)
            waiting[item[0]].remove(item)
            told = None if item is told else told
        elif step in ("pop", "head") and queue:
            item = queue.head() if step == "head" else queue.pop()
            assert item is waiting[item[0]][0] and told in (None, item)
            told = item
            if step == "pop":
                waiting[item[0]].pop(0)
                told = None
        assert len(queue) == sum(map(len, waiting.values())) and bool(queue) == bool(len(queue))
    assert sorted(drained(queue)) == sorted(item for items in waiting.values() for item in items)


def test_an_empty_queue_has_no_head_and_saves_nothing_up() -> None:
    queue = filled(100, a=[1])
    queue.pop()
    with pytest.raises(IndexError):
        queue.head()
    for number in range(50):  # if a hundred tokens were saved in each of fifty turns, all of these would pass at once
        queue.push("a", 1, ("a", 1, number))
        queue.push("b", 1, ("b", 1, number))
        assert [queue.pop()[0], queue.pop()[0]] == ["a", "b"]
    for number in range(4):
        queue.push("a", 60, ("a", 60, number))
        queue.push("b", 60, ("b", 60, number))
    assert [item[0] for item in drained(queue)] == ["a", "b", "a", "a", "b", "b", "a", "b"]
