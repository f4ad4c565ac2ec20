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

from worker.loop_inbox import LoopInbox, loop_inbox


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
        everything, inbox = asyncio.Event(), loop_inbox()

        def take(item: tuple[int, int]) -> None:
            taken.append(item)
            if len(taken) == num_threads * num_items:
                everything.set()

        def fill(thread: int) -> None:
            for number in range(num_items):
                inbox.put(take, (thread, number))
                if number % 50 == 0:
                    time.sleep(0.0001)  # so that the loop falls asleep now and then

        threads = [threading.Thread(target=fill, args=(thread,)) for thread in range(num_threads)]
        for thread in threads:
            thread.start()
        await asyncio.wait_for(everything.wait(), 60)
        for thread in threads:
            thread.join(60)

    asyncio.run(run())
    for thread in range(num_threads):
        assert [number for who, number in taken if who == thread] == list(range(num_items))


def test_one_item_wakes_a_loop_that_sleeps() -> None:
    async def run() -> None:
        arrived: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        threading.Timer(0.2, loop_inbox().put, [arrived.set_result, "news"]).start()
        assert await asyncio.wait_for(arrived, 30) == "news"

    asyncio.run(run())


def test_an_item_from_the_loop_itself_is_taken_later() -> None:
    async def run() -> None:
        taken: list[int] = []
        loop_inbox().put(taken.append, 1)
        assert taken == []
        await asyncio.sleep(0.05)
        assert taken == [1]

    asyncio.run(run())


def test_an_error_is_reported_and_the_items_after_it_are_taken() -> None:
    async def run() -> None:
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
        taken: list[int] = []
        error = ValueError("an item cannot be taken")

        def fail(item: int) -> None:
            raise error

        for take in (taken.append, fail, taken.append):
            loop_inbox().put(take, 1)
        await asyncio.sleep(0.05)
        assert taken == [1, 1] and reported == [error]

    asyncio.run(run())


def test_a_loop_has_one_inbox_whose_descriptors_live_until_nobody_can_put() -> None:
    async def run() -> LoopInbox:
        assert loop_inbox() is loop_inbox()
        return loop_inbox()

    inbox, other = asyncio.run(run()), asyncio.run(run())
    assert inbox is not other
    gc.collect()  # the loops are gone
    inbox.put(print, "nobody takes it")
    ends = inbox._pipe
    for end in ends:
        os.fstat(end)
    del inbox
    gc.collect()
    for end in ends:
        with pytest.raises(OSError):
            os.fstat(end)
