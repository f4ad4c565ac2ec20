"""How many requests are let in, and how many of these are with workers at a time. No I/O.

Two bounds. `Admission` refuses at once what exceeds the queue limit. `Gate` keeps requests here until decode has room
for them, by priority and fairly between tenants: a prompt prefilled too early would hold blocks that running ones need.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import ResourceExhausted, Unavailable
from gateway.fair_queue import FairQueue

RETRY_AFTER_S = 1.0
QUANTUM = 2048
"""Tokens that a tenant may spend with each of its turns: most requests cost less, so that a turn is seldom idle."""
RETURN_POLL_S = 0.05
"""At least so often a group that was given back asks whether there is room for it: workers report it without a word."""


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


@dataclass(frozen=True, slots=True)
class Place:
    """A request's place with the workers, as wide as the sequences that it runs at once."""

    priority: int
    tenant: str
    weight: int
    """Sequences."""
    arrival: int
    """The number of its request in the order in which requests came to the gate."""


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request without a place."""

    place: Place
    future: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class _Returning:
    """A group given back, which has kept its place."""

    place: Place
    fits: Callable[[], bool]
    future: asyncio.Future[None]


class Gate:
    """Lets requests through to workers while there are places; a place is one sequence.

    Lowest priority number first, within a priority deficit round robin between tenants, within a tenant by arrival.
    Whose turn it is waits until it fits: nothing smaller overtakes it but by priority. Groups given back go first.
    """

    def __init__(self, capacity: Callable[[], int], quantum: int = QUANTUM) -> None:
        self._capacity = capacity
        self._quantum = quantum
        self._queues: dict[int, FairQueue[_Waiter]] = {}
        self._returning: list[_Returning] = []
        self._arrivals = 0
        self._num_places = 0
        self.inside = 0
        """Sequences of the requests that have a place."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait: for a place, or for blocks after they were given back."""
        return sum(map(len, self._queues.values())) + len(self._returning)

    @property
    def num_running(self) -> int:
        """Requests that have a place and do not wait."""
        return self._num_places - len(self._returning)

    async def enter(self, priority: int, tenant: str, weight: int, cost: int) -> Place:
        """Wait for places for `weight` sequences; `cost` is in tokens. The place must be given to `leave`."""
        self._arrivals += 1
        place = Place(priority, tenant, weight, self._arrivals)
        if not self._queues and not self._returning and self._fits(weight):
            self._take(place)
            return place
        waiter = _Waiter(place, asyncio.get_running_loop().create_future())
        self._queues.setdefault(priority, FairQueue(self._quantum)).push(tenant, cost, waiter)
        self.wake()
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.future.cancelled():
                self._drop(waiter)
            else:  # let in and cancelled at the same moment
                self.leave(place)
            raise
        return place

    def leave(self, place: Place) -> None:
        self.inside -= place.weight
        self._num_places -= 1
        self.wake()

    async def come_back(self, place: Place, fits: Callable[[], bool]) -> None:
        """Wait until a group that was given back may be prefilled again; it keeps its place, also if this is cancelled.

        `fits` (must not raise) is asked of the first one only, by priority and arrival, and a `wake` that lets one go
        lets nobody else go: by the next one `fits` may know of the blocks that this one takes. Meanwhile no new request
        of the same or a lower priority enters.
        """
        group = _Returning(place, fits, asyncio.get_running_loop().create_future())
        bisect.insort(self._returning, group, key=lambda g: (g.place.priority, g.place.arrival))
        try:
            self.wake()
            while not group.future.done():
                await asyncio.wait((group.future,), timeout=RETURN_POLL_S)
                if self._returning and self._returning[0] is group:
                    self.wake()
        finally:
            if group in self._returning:
                self._returning.remove(group)
                self.wake()

    def wake(self) -> None:
        """Let in whoever fits; also called when workers have come or have reported."""
        if self._returning and self._returning[0].fits():
            back = self._returning.pop(0).future
            back.set_result(None)
            back.get_loop().call_later(RETURN_POLL_S, self.wake)
            return  # whoever is behind it goes later: it is to be with its worker first
        while self._queues:
            priority = min(self._queues)
            queue = self._queues[priority]
            if not self._may_enter(priority) or not self._fits(queue.head().place.weight):
                return
            waiter = queue.pop()
            if not queue:
                del self._queues[priority]
            if not waiter.future.done():
                self._take(waiter.place)
                waiter.future.set_result(None)

    def _may_enter(self, priority: int) -> bool:
        """Not while a group of this priority or a better one waits to come back: it would take its blocks."""
        return not self._returning or priority < self._returning[0].place.priority

    def _fits(self, weight: int) -> bool:
        """Alone even what is wider than all places: it would never get in else."""
        capacity = self._capacity()
        return self.inside + weight <= capacity or (self.inside == 0 and capacity > 0)

    def _take(self, place: Place) -> None:
        self.inside += place.weight
        self._num_places += 1

    def _drop(self, waiter: _Waiter) -> None:
        """A request that waits no more; whoever stood behind it may fit."""
        priority = waiter.place.priority
        queue = self._queues.get(priority)
        if queue is not None:
            queue.discard(waiter.place.tenant, waiter)
            if not queue:
                del self._queues[priority]
        self.wake()
