"""The block stores of all arenas, and the pulls between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from common.trust import NO_TRUST, Trust
from gateway.fleet.pull_client import PullClient, StoreAddress
from gateway.fleet.routing import UNREACHABLE_S, Router
from gateway.fleet.worker_lost import WorkerLost
from protos.v1 import block_store_pb2 as pb


class Stores:
    """The set of block stores in the registry. It tells the router between which arenas blocks can be copied, and how
    long copies take.
    """

    def __init__(self, router: Router, trust: Trust = NO_TRUST) -> None:
        self._router = router
        self._client = PullClient(trust)
        self._by_arena: Mapping[str, StoreAddress] = {}
        self._avoided: dict[tuple[str, str], asyncio.TimerHandle] = {}
        """A timer for each pair of arenas that routing avoids because a copy has failed. The timer removes the pair."""
        router.broken = self._avoided.keys()

    @property
    def addresses(self) -> list[str]:
        """The addresses (host:port) of the stores."""
        return [store.address for store in self._by_arena.values()]

    def on_stores(self, stores: Mapping[str, StoreAddress]) -> None:
        """Replaces the block stores, by arena id, after a poll of the registry."""
        moved = {arena_id for arena_id, store in stores.items() if store != self._by_arena.get(arena_id)}
        for pair in [pair for pair in self._avoided if not moved.isdisjoint(pair)]:
            self._avoided.pop(pair).cancel()
        self._router.stores = {arena_id: store.pulls for arena_id, store in stores.items()}
        self._by_arena = stores

    async def pull(self, request: pb.PullRequest, arena_id: str, timeout_s: float) -> pb.PullResponse:
        """Copies the blocks of a request's ticket into the arena `arena_id`, and fills in `request.source`. Raises
        WorkerLost if one of the two stores is not in the registry, and the errors of `PullClient.pull`. If a store does
        not answer, routing avoids the pair for a while.
        """
        pair, destination = (request.ticket.arena_id, arena_id), self._between(request, arena_id)
        began = time.monotonic()
        try:
            pulled = await self._client.pull(destination, request, timeout_s)
        except WorkerLost as lost:
            if lost.unreachable:
                self._avoid(pair)
            raise
        if not pulled.num_early_tokens:  # otherwise, the time may include a part of an early pull
            self._note_copy(pair, pulled.num_tokens, time.monotonic() - began)
        return pulled

    @asynccontextmanager
    async def early(self, request: pb.PullEarlyRequest, arena_id: str, timeout_s: float) -> AsyncIterator[None]:
        """Copies the blocks of an early ticket into the arena `arena_id`, and fills in `request.source`. The
        destination holds the blocks during the body of the `with` statement. Raises the errors of `pull` and of
        `PullClient.early`. An error does not affect routing.
        """
        began = time.monotonic()
        async with self._client.early(self._between(request, arena_id), request, timeout_s) as num_tokens:
            self._note_copy((request.ticket.arena_id, arena_id), num_tokens, time.monotonic() - began)
            yield

    def _note_copy(self, pair: tuple[str, str], num_tokens: int, seconds: float) -> None:
        """Records the duration of a copy between two arenas (source, destination), for predictions."""
        self._router.costs.note_copy(*pair, num_tokens, seconds, time.monotonic())

    def _between(self, request: pb.PullRequest | pb.PullEarlyRequest, arena_id: str) -> str:
        """Fills in the address of the source, and returns that of the destination. Raises WorkerLost if one of the two
        stores is not in the registry.
        """
        source, destination = map(self._by_arena.get, (request.ticket.arena_id, arena_id))
        if source is None or destination is None:
            raise WorkerLost("pull_no_store", counted=False, suspect=False)
        request.source = source.address
        return destination.address

    async def keep(self) -> None:
        """Closes the idle channels that use old certificates."""
        await self._client.keep()

    async def close(self) -> None:
        await self._client.close()

    def _avoid(self, pair: tuple[str, str]) -> None:
        """Makes routing avoid copies between a pair of arenas for a while."""
        if (before := self._avoided.pop(pair, None)) is not None:
            before.cancel()
        forget = asyncio.get_running_loop().call_later
        self._avoided[pair] = forget(UNREACHABLE_S, self._avoided.pop, pair)
