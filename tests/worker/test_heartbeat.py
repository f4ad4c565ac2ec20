"""The messages of a worker on a stream: items as they arrive, and heartbeats between them."""

from __future__ import annotations

import asyncio

from common.rpc import HEARTBEAT_S
from testing.virtual_time import in_virtual_time
from worker.heartbeat import Outgoing


@in_virtual_time
async def test_where_no_items_come_there_are_heartbeats_and_where_they_come_there_are_none() -> None:
    with Outgoing[int]() as outgoing:
        async with asyncio.timeout(10 * HEARTBEAT_S):
            assert [await outgoing.get() for _ in range(2)] == [[], []]
        for i in range(12):  # longer than the interval of heartbeats
            await asyncio.sleep(HEARTBEAT_S / 8)
            outgoing.put(i)
            assert await outgoing.get() == [i]


@in_virtual_time
async def test_what_was_not_read_comes_together_and_before_the_end() -> None:
    with Outgoing[int](every_s=60.0) as outgoing:
        for i in range(3):
            outgoing.put(i)
        outgoing.end()
        assert await outgoing.get() == [0, 1, 2] and await outgoing.get() is None


@in_virtual_time
async def test_a_reader_that_waits_is_woken_by_an_item_and_by_the_end() -> None:
    with Outgoing[int](every_s=60.0) as outgoing:
        for act, expected in ((lambda: outgoing.put(1), [1]), (outgoing.end, None)):
            reading = asyncio.create_task(outgoing.get())
            await asyncio.sleep(0)
            act()
            async with asyncio.timeout(5):
                assert await reading == expected


@in_virtual_time
async def test_no_timer_is_left() -> None:
    with Outgoing[int](every_s=0.01) as outgoing:
        await asyncio.sleep(0.02)
    outgoing._is_quiet = False
    await asyncio.sleep(0.05)
    assert not outgoing._is_quiet
