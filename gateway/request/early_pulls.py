"""Copies the first blocks of a prompt to the decode worker's arena while prefill computes the rest of the prompt.

Prefill sends early tickets, and the destination's block store copies their blocks, usually one ticket after another.
The pull of the whole prompt then finds these blocks. If an early pull fails, the later pull copies more.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Self

from common.errors import LooseleafError
from gateway.fleet.pull_client import NO_ROOM
from gateway.fleet.routing import Route
from gateway.fleet.worker_lost import WorkerLost
from gateway.fleet.workers import Workers
from gateway.pull_counts import PullCounts
from gateway.request.state import RequestState
from protos.v1 import block_store_pb2, prefill_pb2
from protos.v1 import types_pb2 as types_pb

WAIT_S = 4.0
"""The longest wait of an early ticket for the pull of the ticket before it. The ticket's lease is 8 s."""


class EarlyPulls:
    """The early pulls of one attempt. At the end of a `with` block, all of them end, and their blocks are not held any
    longer.
    """

    def __init__(
        self, workers: Workers, counts: PullCounts, state: RequestState, arena_id: str,
        tickets: prefill_pb2.EarlyTickets,
    ) -> None:  # fmt: skip
        """Creates an attempt without early pulls. `arena_id` is the arena to which blocks are copied."""
        self.tickets = tickets
        """The early tickets to request from prefill."""
        self._workers = workers
        self._counts = counts
        self._state = state
        self._arena_id = arena_id
        self._is_stopped = False
        self._arrived: asyncio.Future[None] | None = None
        """The end of the copy of the newest ticket's blocks."""
        self._num_blocks = 0
        """Number of blocks of each KV group that have arrived."""
        self._tasks: set[asyncio.Task[str]] = set()

    @classmethod
    def of(cls, workers: Workers, counts: PullCounts, state: RequestState, route: Route) -> Self | None:
        """Returns the early pulls of an attempt, or None if there should be none."""
        request = state.request
        will_decode = request.pooling is None and request.stopping.max_tokens > 1
        found = workers.early_tickets(route, state.need) if will_decode else None
        return None if found is None else cls(workers, counts, state, *found)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, ticket: types_pb.Ticket) -> None:
        """Copies the blocks of an early ticket."""
        before, self._arrived = self._arrived, asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._pull(ticket, before, self._arrived))
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, ticket, self._arrived))

    def stop(self) -> None:
        """Begins no further copy, because the pull of the whole prompt begins."""
        self._is_stopped = True

    def close(self) -> None:
        """Ends all pulls, and makes the destination let go of their blocks."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    def known(self, route: Route) -> Route:
        """Returns the route with the tokens that have arrived at the destination counted as cached there."""
        asked, arena_id = route.asked, self._arena_id
        there = asked.cached.get(arena_id, 0) + self._num_blocks * route.prefill.block_size
        return replace(route, asked=replace(asked, cached={**asked.cached, arena_id: there}))

    async def _pull(
        self, ticket: types_pb.Ticket, before: asyncio.Future[None] | None, arrived: asyncio.Future[None]
    ) -> str:
        """Copies a ticket's blocks, sets `arrived`, and holds the blocks until cancelled. Copies nothing if the pulls
        stop before the copy of the ticket before it ends. If there is no copy, returns the reason, one of EARLY_ENDS.
        """
        if before is not None:
            await asyncio.wait({before}, timeout=WAIT_S)
        if self._is_stopped:
            return "stopped"
        try:
            with ExitStack() as copying:
                copying.enter_context(self._counts.copying_early())
                async with self._workers.stores.early(self._request(ticket), self._arena_id, self._state.remaining_s()):
                    copying.close()
                    self._num_blocks += len(ticket.branches[0].groups[0].blocks)
                    arrived.set_result(None)
                    self._workers.give_up(ticket)
                    await asyncio.Event().wait()
        except (LooseleafError, WorkerLost) as error:
            self.stop()
            return "no_room" if isinstance(error, WorkerLost) and error.reason == NO_ROOM else "failed"
        return "stopped"

    def _ended(self, ticket: types_pb.Ticket, arrived: asyncio.Future[None], task: asyncio.Task[str]) -> None:
        """Gives up the ticket, unless its blocks have arrived. A task may be cancelled before it begins."""
        self._tasks.discard(task)
        if arrived.done():
            self._counts.early("copied")
            return
        self._counts.early("stopped" if task.cancelled() else task.result())
        arrived.set_result(None)
        self._workers.give_up(ticket)

    def _request(self, ticket: types_pb.Ticket) -> block_store_pb2.PullEarlyRequest:
        public_tokens = self._state.request.public_tokens
        return block_store_pb2.PullEarlyRequest(
            ticket=ticket, cache_quota=self._state.quota, public_tokens=public_tokens
        )
