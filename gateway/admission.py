"""How many requests are let in, and how many of these are with workers at a time. No I/O, no clock.

Two bounds. `Admission` refuses at once what exceeds the queue limit. `Gate` keeps requests here, by priority and
arrival, until decode has room for them: a prompt prefilled too early would hold blocks that running sequences need.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.errors import ResourceExhausted, Unavailable

RETRY_AFTER_S = 1.0


class Admission:
    """Counts requests from their arrival to their end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.current = 0
        self.draining = False

    @contextmanager
    def enter(self, count: int = 1) -> Iterator[None]:
        """Hold `count` places. ResourceExhausted at the limit, Unavailable while draining, both with a retry time."""
        if self.draining:
            raise Unavailable("this gateway shuts down", retry_after_s=RETRY_AFTER_S)
        if self.current + count > self._limit:
            raise ResourceExhausted(
                f"the queue is full: the limit is {self._limit} requests at once (max_queue)",
                retry_after_s=RETRY_AFTER_S,
            )
        self.current += count
        try:
            yield
        finally:
            self.current -= count


class Gate:
    """Lets requests through to workers while there are places, lowest priority number first, then by arrival."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = 0
        self.inside = 0

    @property
    def num_waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._waiting)

    async def enter(self, priority: int) -> None:
        """Wait for a place. Whoever comes back from this must call `leave`."""
        if not self._waiting and self.inside < self._capacity():
            self.inside += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._waiting, (priority, self._arrivals, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # let in and cancelled at the same moment
                self.leave()
            raise

    def leave(self) -> None:
        self.inside -= 1
        self.wake()

    def wake(self) -> None:
        """Let in whoever fits; also called when workers have come."""
        while self._waiting and (self._waiting[0][2].done() or self.inside < self._capacity()):
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                self.inside += 1
                future.set_result(None)
