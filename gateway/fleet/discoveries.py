"""Discovery through several Redis servers, each of which serves one or more arenas.

Each server has the ledgers of its own arenas and the records of their workers and block stores. This module uses one
circuit breaker per server. If a server is lost, its workers stay known, but prefixes in their arenas are not looked up.
The arenas of the other servers are not affected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from block_store.errors import BlockStoreError
from block_store.ledger.scripts import LedgerScripts
from common.telemetry import Fallbacks
from common.ticket import Ticket
from common.types import WorkerRecord
from gateway.fleet.discovery import Discovery
from gateway.fleet.pull_client import StoreAddress
from gateway.intake.resolved_request import ResolvedRequest

logger = logging.getLogger("discovery")


class Discoveries:
    """A client of several Redis servers that merges their lists of workers and block stores."""

    def __init__(
        self,
        redis_urls: Sequence[str],
        poll_s: float,
        on_records: Callable[[list[WorkerRecord]], None],
        on_stores: Callable[[Mapping[str, StoreAddress]], None],
    ) -> None:
        """`on_records` and `on_stores` receive the merged list whenever a server's list has been read."""
        self._on_records = on_records
        self._on_stores = on_stores
        self._records: list[list[WorkerRecord]] = [[] for _ in redis_urls]
        self._stores: list[Mapping[str, StoreAddress]] = [{} for _ in redis_urls]
        self._parts = [
            Discovery(url, poll_s, partial(self._take, i), on_stores=partial(self._take_stores, i))
            for i, url in enumerate(redis_urls)
        ]
        self._fallbacks = Fallbacks(logger)

    async def run(self) -> None:
        """Polls all servers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for part in self._parts:
                group.create_task(part.run())

    async def check(self) -> None:
        """Checks that the servers answer, and logs a warning for each server that does not. If no server answers,
        raises the error of the first one.
        """
        errors = await asyncio.gather(*(self._error_of(part) for part in self._parts))
        for number, error in enumerate(errors, 1):
            if error is not None and None not in errors:
                raise error
            if error is not None:
                logger.warning("Redis server %d of %d cannot be reached: %s", number, len(errors), error)

    async def cached_tokens(self, workers: Iterable[WorkerRecord], request: ResolvedRequest) -> dict[str, int]:
        """Returns the number of leading tokens of the prompt that prefill would find in each arena, by arena id. An
        arena whose server does not answer in time is left out (`Discovery.cached_tokens`).
        """
        asked: dict[int, list[WorkerRecord]] = {}
        for record in workers:
            if (number := self._server_of(record.arena_id)) is not None:
                asked.setdefault(number, []).append(record)
        found = await asyncio.gather(*(self._parts[i].cached_tokens(records, request) for i, records in asked.items()))
        return {arena_id: num_tokens for part in found for arena_id, num_tokens in part.items()}

    async def end_ticket(self, ticket: Ticket) -> None:
        """Ends a ticket that no worker will claim, if a server lists a worker of the ticket's arena."""
        if (number := self._server_of(ticket.arena_id)) is not None:
            await self._parts[number].end_ticket(ticket)

    @property
    def ledgers(self) -> Mapping[str, LedgerScripts]:
        """Clients of the ledgers of all known arenas, by arena id."""
        return {arena_id: ledger for part in self._parts for arena_id, ledger in part.ledgers.items()}

    def close(self) -> None:
        for part in self._parts:
            part.close()

    async def _error_of(self, part: Discovery) -> BlockStoreError | None:
        try:
            await part.check()
        except BlockStoreError as error:
            return error
        return None

    def _server_of(self, arena_id: str) -> int | None:
        named = (i for i, records in enumerate(self._records) if any(r.arena_id == arena_id for r in records))
        return next(named, None)

    def _take(self, number: int, records: list[WorkerRecord]) -> None:
        self._records[number] = records
        every: dict[str, WorkerRecord] = {}
        for record in (record for part in self._records for record in part):
            if every.setdefault(record.worker_id, record) is not record:
                self._fallbacks.note(
                    "worker ignored", f"two Redis servers have a worker with the id {record.worker_id}"
                )
        self._on_records(list(every.values()))

    def _take_stores(self, number: int, stores: Mapping[str, StoreAddress]) -> None:
        self._stores[number] = stores
        self._on_stores({arena_id: store for part in self._stores for arena_id, store in part.items()})
