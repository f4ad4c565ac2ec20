"""A worker's stream to a gateway, with heartbeats between its items.

The gateway's side is `gateway.fleet.liveness`. A frozen process keeps its connections, but its heartbeats stop.
"""

from __future__ import annotations

import asyncio
from typing import Generic, Self, TypeVar

from common.rpc import HEARTBEAT_S

T = TypeVar("T")


class Outgoing(Generic[T]):
    """A queue of items for one reader, with heartbeats. It is used in one event loop, inside a `with` block."""

    def __init__(self, every_s: float = HEARTBEAT_S) -> None:
        """Creates an empty queue. A call of `get` returns after about `every_s` seconds at the latest."""
        self._tick_s = every_s / 2
        self._items: list[T] = []
        self._is_over = False
        self._is_quiet = False
        """Whether nothing was read between the last two ticks."""
        self._num_read = self._num_seen = 0
        """Number of reads so far, and the number of reads up to the last tick."""
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def end(self) -> None:
        """Ends the stream after the queued items."""
        self._is_over = True
        self._wake()

    async def get(self) -> list[T] | None:
        """Returns all queued items. An empty list means that nothing has arrived for at least half of `every_s`, so it
        is time for a heartbeat. None means the end.
        """
        while not (self._items or self._is_over or self._is_quiet):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._items and self._is_over:
            return None
        items, self._items, self._is_quiet = self._items, [], False
        self._num_read += 1
        return items

    def _tick(self) -> None:
        if self._num_seen == self._num_read:
            self._is_quiet = True
            self._wake()
        self._num_seen = self._num_read
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
