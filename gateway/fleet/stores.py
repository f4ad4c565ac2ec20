"""The block stores of all arenas, and the pulls between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

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
        pair = (request.ticket.arena_id, arena_id)
        source, destination = map(self._by_arena.get, pair)
        if source is None or destination is None:
            raise WorkerLost("pull_no_store", counted=False, suspect=False)
        request.source = source.address
        began = time.monotonic()
        try:
            pulled = await self._client.pull(destination.address, request, timeout_s)
        except WorkerLost as lost:
            if lost.unreachable:
                self._avoid(pair)
            raise
        now = time.monotonic()
        self._router.costs.note_copy(*pair, pulled.num_tokens, now - began, now)
        return pulled

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
