"""The gate: requests wait in order of priority, and tenants get fair shares."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.gate import Gate, Place
from gateway.admission.queue_wait import Margin, ServiceRate


async def enter(gate: Gate, priority: int = 0, tenant: str = "", weight: int = 1, cost: int = 10) -> Place:
    return await gate.enter(priority, tenant, weight, cost)


async def test_the_gate_lets_in_by_priority_then_arrival_and_never_more_than_fit() -> None:
    gate, order = Gate(lambda: 2), []
    inside: list[Place] = []

    async def one(name: str, priority: int) -> None:
        inside.append(await enter(gate, priority))
        order.append(name)
        assert gate.inside <= 2

    tasks = [asyncio.create_task(one(*item)) for item in [("a", 0), ("b", 5), ("c", 5), ("d", 1), ("e", 5), ("f", -1)]]
    await asyncio.sleep(0.01)
    assert order == ["a", "b"] and gate.num_waiting == 4
    for _ in range(4):
        gate.leave(inside.pop(0))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert order == ["a", "b", "f", "d", "c", "e"]
    await asyncio.gather(*tasks)
    assert gate.inside == 2


async def test_a_waiter_that_is_cancelled_takes_no_place() -> None:
    gate = Gate(lambda: 1)
    place = await enter(gate)
    first, second = asyncio.create_task(enter(gate)), asyncio.create_task(enter(gate))
    await asyncio.sleep(0.01)
    gate.leave(place)  # lets `first` in at the moment of its cancellation
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.leave(await asyncio.wait_for(second, 60))
    assert gate.inside == 0 and gate.num_waiting == 0


async def test_room_that_comes_later_is_noticed() -> None:
    room = 0
    gate = Gate(lambda: room)
    task = asyncio.create_task(enter(gate))
    await asyncio.sleep(0.01)
    assert not task.done()
    room = 1
    gate.wake()
    await asyncio.wait_for(task, 60)


class Crowd:
    """A group of requests at a gate, by name."""

    def __init__(self, gate: Gate, tenant: str | None = None) -> None:
        """`tenant` is the tenant of all requests. Without it, the first letter of a name is the request's tenant."""
        self.gate = gate
        self.tenant = tenant
        self.order: list[str] = []
        """The requests that were let in or came back, in order."""
        self.places: dict[str, Place] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, **request: Any) -> None:
        """Sends one request for each name."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._enter(name, {"tenant": self.tenant or name[0], **request}))
        await settled()

    async def _enter(self, name: str, request: dict[str, Any]) -> None:
        self.places[name] = await enter(self.gate, **request)
        self.order.append(name)

    async def come_back(self, name: str, fits: Callable[[], bool]) -> None:
        self.tasks[name] = asyncio.create_task(self._return(name, fits))
        await settled()

    async def _return(self, name: str, fits: Callable[[], bool]) -> None:
        await self.gate.come_back(self.places[name], fits)
        self.order.append(name)

    async def leave(self, name: str) -> None:
        self.gate.leave(self.places.pop(name))
        await settled()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_and_within_one_the_first_comes_first() -> None:
    crowd = Crowd(Gate(lambda: 1, quantum=100))
    await crowd.come("a0", "a1", "a2", "a3", "a4", "a5", "b0", "b1", "c0", cost=50)
    while crowd.places:
        await crowd.leave(crowd.order[-1])
    assert crowd.order == ["a0", "a1", "a2", "b0", "b1", "c0", "a3", "a4", "a5"]


async def test_a_wide_group_waits_for_its_places_and_nothing_smaller_overtakes_it_but_by_priority() -> None:
    crowd = Crowd(Gate(lambda: 8), "one")
    await crowd.come("a0", "a1", weight=3)
    await crowd.come("w", weight=5)
    await crowd.come("b0", weight=1)
    assert crowd.order == ["a0", "a1"] and crowd.gate.inside == 6
    await crowd.come("p", weight=1, priority=-1)
    assert crowd.order[2:] == ["p"] and crowd.gate.inside == 7
    await crowd.leave("a0")
    assert crowd.order[3:] == [], "7 - 3 + 5 are 9"
    await crowd.leave("p")
    assert crowd.order[3:] == ["w"] and crowd.gate.inside == 8
    await crowd.leave("a1")
    assert crowd.order[4:] == ["b0"]


async def test_what_is_wider_than_all_places_gets_in_alone() -> None:
    crowd = Crowd(Gate(lambda: 4), "one")
    await crowd.come("a", "b", weight=1)
    await crowd.come("w", weight=9)
    await crowd.leave("a")
    assert crowd.order == ["a", "b"]
    await crowd.leave("b")
    await crowd.come("c", weight=1)
    assert crowd.order == ["a", "b", "w"] and crowd.gate.inside == 9
    await crowd.leave("w")
    assert crowd.order[3:] == ["c"]


async def test_when_a_wide_head_is_cancelled_the_next_ones_enter() -> None:
    crowd = Crowd(Gate(lambda: 4), "one")
    await crowd.come("a", weight=2)
    await crowd.come("w", weight=4)
    await crowd.come("b", "c", weight=1)
    await crowd.cancel("w")
    assert crowd.order == ["a", "b", "c"] and crowd.gate.inside == 4 and crowd.gate.num_waiting == 0


async def test_groups_given_back_keep_their_place_and_go_first_by_priority_and_arrival() -> None:
    crowd, roomy = Crowd(Gate(lambda: 4), "one"), set[str]()
    await crowd.come("low", priority=5)
    await crowd.come("old", "new", priority=1)
    for name in ("new", "old", "low"):
        await crowd.come_back(name, lambda name=name: name in roomy)  # type: ignore[misc]
    assert crowd.gate.inside == 3 and crowd.gate.num_running == 0 and crowd.gate.num_waiting == 3
    await crowd.come("same", "worse", priority=1)
    await crowd.come("better", priority=0)
    assert crowd.order == ["low", "old", "new", "better"], "there is a place, but it would take the blocks"
    await crowd.leave("better")
    for also, expected in (("low", set()), ("new", set()), ("other", set()), ("old", {"old"})):
        roomy.add(also)
        crowd.gate.wake()
        assert crowd.gate.num_running == len(expected), "one is let go by a wake: the next must know what it takes"
        await settled()
    await asyncio.gather(crowd.tasks["new"], crowd.tasks["same"])
    assert crowd.order[4] == "old"
    await crowd.leave("old")
    await asyncio.gather(crowd.tasks["low"], crowd.tasks["worse"])
    assert crowd.gate.inside == 4 and crowd.gate.num_waiting == 0, "nobody called wake: the gate did"


async def test_groups_given_back_ask_by_themselves_and_only_the_first_is_asked() -> None:
    crowd, asked = Crowd(Gate(lambda: 4), "one"), list[str]()

    def fits(name: str, after: int) -> bool:
        asked.append(name)
        return asked.count(name) >= after

    await crowd.come("a", "b")
    await crowd.come_back("a", lambda: fits("a", 4))
    await crowd.come_back("b", lambda: fits("b", 1))
    async with asyncio.timeout(60):
        await asyncio.gather(crowd.tasks["a"], crowd.tasks["b"])
    assert asked == ["a", "a", "a", "a", "b"] and crowd.order[2:] == ["a", "b"]


async def test_a_cancelled_return_blocks_nobody() -> None:
    crowd = Crowd(Gate(lambda: 2), "one")
    await crowd.come("a")
    await crowd.come_back("a", lambda: False)
    await crowd.come("b")
    assert crowd.order == ["a"]
    await crowd.cancel("a")
    assert crowd.order == ["a", "b"] and crowd.gate.inside == 2
    await crowd.leave("a")
    await crowd.leave("b")
    assert crowd.gate.inside == crowd.gate.num_waiting == crowd.gate.num_running == 0


async def test_a_newcomer_enters_although_another_tenant_has_every_place_and_goes_before_its_surplus() -> None:
    crowd = Crowd(Gate(lambda: 32))
    await crowd.come(*(f"a{number}" for number in range(40)), priority=-5)
    assert crowd.gate.inside == 32 and crowd.gate.num_waiting == 8
    await crowd.come("b0", "b1", "b2")
    assert crowd.order[32:] == ["b0", "b1"], "a sixteenth of 32"
    assert crowd.places["b0"].rank < min(crowd.places[f"a{number}"].rank for number in range(32))
    await crowd.leave("b0")
    assert crowd.order[34:] == ["b2"], "its next one takes the reserved place"
    await crowd.leave("a0")
    assert crowd.gate.inside == 33, "who came in beyond all places takes nobody else's place with it"


async def test_nobody_alone_has_a_reserve_and_who_can_wait_has_none() -> None:
    crowd = Crowd(Gate(lambda: 32))
    await crowd.come(*(f"a{number}" for number in range(33)))
    assert all(place.rank == 0 for place in crowd.places.values()) and crowd.gate.inside == 32
    await crowd.come("b", priority=1)
    await crowd.come("c", weight=12)
    assert crowd.order[32:] == [], "b says that it can wait, c asks for more than an even share"
    await crowd.come("d", weight=7)
    assert crowd.order[32:] == ["d"], "one request of any size up to an even share"


async def test_all_reserves_together_leave_half_of_the_places_to_others() -> None:
    crowd = Crowd(Gate(lambda: 32))
    await crowd.come(*(f"a{number}" for number in range(32)))
    await crowd.come(*"bcdefghijklmnopqrstuvwxyz")
    assert crowd.gate.inside == 32 + 16 and crowd.gate.num_waiting == 9


async def test_the_predicted_wait_is_the_work_before_over_the_rate_at_which_it_was_done() -> None:
    now = [0.0]
    crowd = Crowd(Gate(lambda: 4, quantum=100, clock=lambda: now[0]))
    gate = crowd.gate
    assert gate.wait_s("a", 0, {}) is None, "nothing has been seen yet"
    await crowd.come(*(f"a{number}" for number in range(40)), cost=100)
    for number in range(20):  # two per second
        now[0] += 0.5
        await crowd.leave(f"a{number}")
    assert gate.num_waiting == 16 and gate.wait_s("a", 0, {}) == pytest.approx(17 / 2, rel=0.05)
    assert gate.wait_s("a", 0, {"a": 4}) == pytest.approx(21 / 2, rel=0.05), "admitted, and not at the gate yet"
    assert gate.wait_s("a", -1, {}) == pytest.approx(1 / 2, rel=0.05), "it is next"
    assert gate.wait_s("b", 0, {}) == 0.0, "its place is reserved"
    assert gate.wait_s("b", 1, {}) == pytest.approx(2 / 2, rel=0.05), "one turn of the other tenant's"
    for name in [f"a{number}" for number in range(20, 36)]:
        await crowd.leave(name)
    assert gate.inside == 4 and gate.num_waiting == 0
    for name in [f"a{number}" for number in range(36, 40)]:
        await crowd.leave(name)
    rate_before = gate._rate.per_second
    now[0] += 10_000.0
    assert gate.wait_s("a", 0, {"a": 3}) == 0.0 and gate._rate.per_second == rate_before, "idle is not slow"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9))
def test_no_place_is_lost_whatever_is_cancelled_and_everybody_gets_in(seed: int, capacity: int) -> None:
    asyncio.run(_random_life(random.Random(seed), capacity))


async def _random_life(rng: random.Random, capacity: int) -> None:
    """Requests arrive, leave, are given back and are cancelled, also at the moment of their admission."""
    crowd, room = Crowd(Gate(lambda: capacity, quantum=40)), [True]
    gate = crowd.gate

    def check() -> None:
        places = list(crowd.places.values())
        ordinary = [place.weight for place in places if not place.reserved]
        reserved = sum(place.weight for place in places) - sum(ordinary)
        assert gate.inside == sum(ordinary) + reserved and reserved <= capacity // 2
        assert sum(ordinary) <= capacity or len(ordinary) == 1

    for number in range(60):
        step = rng.choice(["come", "come", "leave", "leave and cancel", "give back", "room"])
        inside = [name for name in crowd.places if crowd.tasks[name].done()]
        waiting = [name for name, task in crowd.tasks.items() if not task.done()]
        if step == "come":
            request = {"priority": rng.randrange(2), "weight": rng.randint(1, 4), "cost": rng.randint(1, 200)}
            await crowd.come(f"{rng.choice('abc')}{number}", **request)
        elif step == "room":
            room[0] = not room[0]
            gate.wake()
        elif step == "give back" and inside:
            await crowd.come_back(rng.choice(inside), lambda: room[0])
        elif step.startswith("leave") and inside:
            gate.leave(crowd.places.pop(rng.choice(inside)))
            for name in rng.sample(waiting, len(waiting) // 3) if step != "leave" else ():
                crowd.tasks[name].cancel()
        await settled()
        check()
    room[0] = True
    for _ in range(200):
        gate.wake()
        await settled()
        for name in [name for name in crowd.places if crowd.tasks[name].done()]:
            await crowd.leave(name)
        check()
        if not crowd.places and not gate.num_waiting:
            break
    assert all(task.done() for task in crowd.tasks.values())
    assert gate.inside == gate.num_waiting == gate.num_running == 0


def test_the_margin_covers_nearly_all_waits_and_shrinks_when_they_do() -> None:
    margin, rng = Margin(), random.Random(1)
    waits = [rng.uniform(1.0, 3.0) for _ in range(4000)]
    late = 0
    for number, waited in enumerate(waits):
        late += number >= 500 and waited > 1.0 + margin.seconds
        margin.learn(1.0, waited)
    assert 0.005 < late / 3500 < 0.04, late
    for _ in range(3000):
        margin.learn(1.0, 1.0)
    assert margin.seconds < 0.1


def test_a_rate_follows_what_is_done_while_it_is_busy_and_nothing_else() -> None:
    rate, now = ServiceRate(), 0.0

    def served(seconds: int, per_second: int) -> None:
        nonlocal now
        for _ in range(seconds * per_second):
            began, now = rate.mark(), now + 1 / per_second
            rate.pass_time(now, busy=True)
            rate.done(100, began)

    rate.pass_time(now, busy=True)
    served(3, 5)
    assert rate.per_second is None, "15 requests say too little"
    served(30, 5)
    assert rate.per_second == pytest.approx(500, rel=0.05)
    rate.pass_time(now, busy=False)
    began, now = rate.mark(), now + 3600.0
    rate.pass_time(now, busy=True)
    rate.done(100, began)
    assert rate.per_second == pytest.approx(500, rel=0.05)
    served(60, 20)
    assert rate.per_second == pytest.approx(2000, rel=0.1)


async def test_requests_that_end_together_all_count() -> None:
    """After the first requests end, the gate is no longer busy, but the work of the others still counts."""
    now = [0.0]
    gate = Gate(lambda: 10, clock=lambda: now[0])
    for _ in range(6):
        places = [await gate.enter(0, "a", 1, 100) for _ in range(10)]
        now[0] += 2.0
        for place in places:
            gate.leave(place)
        now[0] += 5.0  # idle
    assert gate._rate.per_second == pytest.approx(10 * 100 / 2.0, rel=0.1)
