"""Items from other threads arrive in the event loop, in order and once, and the loop sleeps until they come."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from worker.loop_inbox import LoopInbox


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads change after every few instructions."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_items_of_several_threads_arrive_in_order_and_once(frequent_switches: None) -> None:
    num_threads, num_items = 4, 5000
    taken: list[tuple[int, int]] = []

    async def run() -> None:
        everything = asyncio.Event()

        def take(item: tuple[int, int]) -> None:
            taken.append(item)
            if len(taken) == num_threads * num_items:
                everything.set()

        inbox = LoopInbox(take)

        def fill(thread: int) -> None:
            for number in range(num_items):
                inbox.put((thread, number))
                if number % 50 == 0:
                    time.sleep(0.0001)  # so that the loop falls asleep now and then

        threads = [threading.Thread(target=fill, args=(thread,)) for thread in range(num_threads)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(everything.wait(), 60)
        for thread in threads:
            thread.join(60)
        inbox.close()

    asyncio.run(run())
    for thread in range(num_threads):
        assert [number for who, number in taken if who == thread] == list(range(num_items))


def test_one_item_wakes_a_loop_that_sleeps() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[str] = loop.create_future()
        inbox = LoopInbox(arrived.set_result)
        threading.Timer(0.2, inbox.put, ["news"]).start()
        assert await asyncio.wait_for(arrived, 30) == "news"
        inbox.close()

    asyncio.run(run())


def test_an_item_from_the_loop_itself_is_taken_later() -> None:
    async def run() -> None:
        taken: list[int] = []
        inbox = LoopInbox(taken.append)
        inbox.put(1)
        assert taken == []
        await asyncio.sleep(0.05)
        assert taken == [1]
        inbox.close()

    asyncio.run(run())


def test_after_close_nothing_is_taken_and_the_descriptors_live_until_nobody_can_put() -> None:
    async def run() -> tuple[int, int]:
        taken: list[int] = []
        inbox = LoopInbox(taken.append)
        inbox.close()
        inbox.put(1)
        await asyncio.sleep(0.05)
        assert taken == []
        ends = inbox._pipe
        for end in ends:
            os.fstat(end)
        return ends

    ends = asyncio.run(run())
    gc.collect()
    for end in ends:
        with pytest.raises(OSError):
            os.fstat(end)
