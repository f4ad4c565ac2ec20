"""The two bounds: refused at once beyond the queue limit, kept in order before the workers."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import ResourceExhausted, Unavailable
from gateway.admission import Admission, Gate, Place


def test_the_limit_is_exact_and_places_come_back() -> None:
    admission = Admission(3)
    with admission.enter(2), admission.enter():
        with pytest.raises(ResourceExhausted, match="limit is 3") as caught, admission.enter():
            pass
        assert caught.value.retry_after_s is not None and admission.current == 3
    assert admission.current == 0
    with pytest.raises(ResourceExhausted), admission.enter(4):
        pass
    admission.draining = True
    with pytest.raises(Unavailable), admission.enter():
        pass


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
    gate.leave(place)  # lets `first` in at the moment in which it is cancelled
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.leave(await asyncio.wait_for(second, 1))
    assert gate.inside == 0 and gate.num_waiting == 0


async def test_room_that_comes_later_is_noticed() -> None:
    room = 0
    gate = Gate(lambda: room)
    task = asyncio.create_task(enter(gate))
    await asyncio.sleep(0.01)
    assert not task.done()
    room = 1
    gate.wake()
    await asyncio.wait_for(task, 1)
