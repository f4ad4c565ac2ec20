"""The gate to the workers, where a request waits until decode has room for it. This module does no I/O.

Requests wait here because a prompt that is prefilled too early takes blocks that running requests need. Waiting
requests pass in order of priority, and tenants share the places fairly. The gate also predicts how long a request that
arrives now will wait.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from gateway.admission.fair_queue import FairQueue
from gateway.admission.queue_wait import Margin, Mark, ServiceRate, work_before
from gateway.admission.shares import Shares

QUANTUM = 2048
"""Tokens that a tenant may spend per turn."""
RETURN_POLL_S = 0.05
"""Interval in seconds at which the gate checks whether the first group that was given back fits, because no event
reports that workers have room. It is also the pause after one such group has been let through.
"""
BUSY_SHARE = 0.7
"""The service counts as busy if at least this share of the places (`Workers.gate_capacity`) is taken."""
RESERVED_RANK = -(1 << 32)
"""A number added to the priority of a request with a reserved place, so that the request precedes every request without
one.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """The record of a request's places at the workers: one place for each sequence that the request runs at a time."""

    priority: int
    tenant: str
    weight: int
    """Number of sequences."""
    cost: int
    """Cost in tokens."""
    arrival: int
    """The request's position in the order of arrival at the gate."""
    reserved: bool = False
    predicted_s: float | None = 0.0
    """Predicted wait in seconds at the time the request arrived, or None if unknown."""
    began: Mark | None = None
    """When the request got its places, or None if it still waits."""

    @property
    def rank(self) -> int:
        """The request's priority at the workers. Lower numbers go first."""
        return self.priority + (RESERVED_RANK if self.reserved else 0)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for a place."""

    wanted: Place
    future: asyncio.Future[Place]


@dataclass(slots=True, eq=False)
class _Returning:
    """A sequence group that was given back and waits to be prefilled again. It has kept its place."""

    place: Place
    fits: Callable[[], bool]
    future: asyncio.Future[None]


class Gate:
    """The queue in front of the workers. A request passes when it fits, which usually means that there is a place for
    each of its sequences (`_fits`). The lowest priority number goes first. Within a priority, deficit round robin
    decides between tenants, and the order of arrival decides within a tenant.

    The request whose turn it is waits until it fits. A smaller request overtakes it only with a better priority, or
    with a place reserved for a tenant that has less than its share (`Shares`). Groups that were given back precede new
    requests of the same rank.
    """

    def __init__(
        self, capacity: Callable[[], int], quantum: int = QUANTUM, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._quantum = quantum
        self._clock = clock
        self._queues: dict[int, FairQueue[_Waiter]] = {}
        self._returning: list[_Returning] = []
        self._shares = Shares()
        self._rate = ServiceRate()
        self._margin = Margin()
        self._arrivals = 0
        self._num_places = 0
        self.inside = 0
        """Number of sequences of the requests that have places."""

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a place, including requests that were given back and wait for blocks."""
        return sum(map(len, self._queues.values())) + len(self._returning)

    @property
    def num_running(self) -> int:
        """Number of requests that have a place and are not waiting to come back."""
        return self._num_places - len(self._returning)

    def wait_s(self, tenant: str, priority: int, coming: Mapping[str, int]) -> float | None:
        """Returns the longest time, in seconds, for which a request arriving now is likely to wait, or None until a
        rate has been measured. `coming` has, for each tenant, the number of admitted requests that have not reached the
        gate.
        """
        predicted = self._predict(tenant, priority, coming)
        return None if predicted is None else predicted + self._margin.seconds * (predicted > 0.0)

    def waited(self, place: Place, seconds: float) -> None:
        """Records how long a request waited, from its arrival at the gate until its prefill began."""
        if place.predicted_s is not None:
            self._margin.learn(place.predicted_s, seconds)

    def _predict(self, tenant: str, priority: int, coming: Mapping[str, int]) -> float | None:
        """Returns the predicted mean wait in seconds, or None until a rate has been measured. The prediction is 0 if
        the request may use a reserved place, or if enough places are free for it and for the work ahead of it. `wait_s`
        returns the likely maximum.
        """
        self._note_time()
        rate, capacity = self._rate.per_second, self._capacity()
        if rate is None:
            return None
        if self._shares.may_reserve(tenant, priority, 1, capacity):
            return 0.0
        each = self._rate.mean_cost
        work = Counter({name: count * each for name, count in coming.items()})
        for other, queue in self._queues.items():
            if other <= priority:
                work.update(queue.costs())
        before = work_before(tenant, work, self._quantum) + each - (capacity - self.inside) * each
        return max(0.0, before) / rate

    async def enter(self, priority: int, tenant: str, weight: int, cost: int) -> Place:
        """Waits until a request of `weight` sequences may pass, and returns the record of its places, which the caller
        must pass to `leave`. `cost` is in tokens.
        """
        self._arrivals += 1
        self._rate.note_cost(cost, weight)
        wanted = Place(priority, tenant, weight, cost, self._arrivals)
        if not self._queues and not self._returning and self._fits(weight):
            return self._take(wanted, reserved=self._may_reserve(wanted))
        wanted = replace(wanted, predicted_s=self._predict(tenant, priority, {}))
        waiter = _Waiter(wanted, asyncio.get_running_loop().create_future())
        self._queues.setdefault(priority, FairQueue(self._quantum)).push(tenant, cost, waiter)
        self._shares.wait(tenant, weight)
        self.wake()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter.future.cancelled():
                self._drop(waiter)
            else:  # the request was let in and cancelled at the same moment
                self.leave(waiter.future.result())
            raise

    def leave(self, place: Place) -> None:
        self.inside -= place.weight
        self._num_places -= 1
        self._shares.leave(place.tenant, place.weight, reserved=place.reserved)
        self._note_time()
        if place.began is not None:
            self._rate.done(place.cost, place.began)
        self.wake()

    async def come_back(self, place: Place, fits: Callable[[], bool]) -> None:
        """Waits until a group that was given back may be prefilled again. The group keeps its place, even if this call
        is cancelled.

        `wake` calls `fits`, which must not raise, only for the first group by rank and arrival. `wake` lets at most one
        group through, so that the next call of `fits` can account for that group's blocks. While a group waits, no new
        request of the same or a worse rank is let in.
        """
        group = _Returning(place, fits, asyncio.get_running_loop().create_future())
        bisect.insort(self._returning, group, key=lambda g: (g.place.rank, g.place.arrival))
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
        """Lets in the first group that was given back if it fits, and otherwise the requests whose turn it is. The
        owner must also call this method regularly, because workers may have joined or may have more room.
        """
        self._let_in()
        self._note_time()

    def _let_in(self) -> None:
        if self._returning and self._returning[0].fits():
            back = self._returning.pop(0).future
            back.set_result(None)
            back.get_loop().call_later(RETURN_POLL_S, self.wake)
            return  # the groups behind it follow after this one has reached its worker
        for waiter in self._with_reserve():
            self._admit(waiter, reserved=True)
        while self._queues:
            priority = min(self._queues)
            queue = self._queues[priority]
            if not self._may_enter(priority) or not self._fits(queue.head().wanted.weight):
                return
            waiter = queue.pop()
            self._forget_if_empty(priority)
            self._admit(waiter, reserved=False)

    def _with_reserve(self) -> Iterator[_Waiter]:
        """Yields the waiters that may enter even if all places are taken. Removes each of these waiters from its
        queue.
        """
        if self._shares.num_tenants < 2:
            return
        for priority in sorted(self._queues):
            queue = self._queues[priority]
            for tenant in queue.tenants():
                while (first := queue.first(tenant)) is not None and self._may_reserve(first.wanted):
                    queue.take(tenant)
                    yield first
            self._forget_if_empty(priority)

    def _admit(self, waiter: _Waiter, *, reserved: bool) -> None:
        wanted = waiter.wanted
        if not waiter.future.done():
            waiter.future.set_result(self._take(wanted, reserved=reserved))
        self._shares.wait_no_more(wanted.tenant, wanted.weight)

    def _may_reserve(self, wanted: Place) -> bool:
        capacity = self._capacity()
        reserve = self._shares.may_reserve(wanted.tenant, wanted.priority, wanted.weight, capacity)
        return capacity > 0 and reserve and self._may_enter(wanted.priority + RESERVED_RANK)

    def _may_enter(self, rank: int) -> bool:
        """Returns whether requests of this rank may enter. They may not while a group of the same or a better rank
        waits to come back, because they would take that group's blocks.
        """
        return not self._returning or rank < self._returning[0].place.rank

    def _fits(self, weight: int) -> bool:
        """Returns whether a request of `weight` sequences fits. A request with more sequences than there are places
        fits when no other request has a place. Without this exception, it would never be let in.
        """
        capacity = self._capacity()
        return self.inside + weight <= capacity or (self.inside == 0 and capacity > 0)

    def _take(self, wanted: Place, *, reserved: bool) -> Place:
        self._note_time()
        place = replace(wanted, reserved=reserved, began=self._rate.mark())
        self.inside += place.weight
        self._num_places += 1
        self._shares.enter(place.tenant, place.weight, reserved=reserved)
        self._note_time()
        return place

    def _drop(self, waiter: _Waiter) -> None:
        """Removes a request that was cancelled, and wakes the gate because the next request may fit."""
        wanted = waiter.wanted
        queue = self._queues.get(wanted.priority)
        if queue is not None and queue.discard(wanted.tenant, waiter):
            self._shares.wait_no_more(wanted.tenant, wanted.weight)
            self._forget_if_empty(wanted.priority)
        self.wake()

    def _forget_if_empty(self, priority: int) -> None:
        if not self._queues[priority]:
            del self._queues[priority]

    def _note_time(self) -> None:
        """Updates the busy time. The service counts as busy even before all places are taken, because decode's batches
        are full earlier.
        """
        busy = bool(self._queues) or self.inside >= BUSY_SHARE * self._capacity()
        self._rate.pass_time(self._clock(), busy=busy)
