"""Pulls into the store's arena, for a store that accepts them. The arena's puller is made with the first pull.

Does not use protobuf.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from block_store.arena.arena import Arena
from block_store.arena.header import Memory
from block_store.holder.attach import Attached, Needs
from block_store.server.arena_owner import ArenaOwner
from block_store.transfer.puller import Pulled, Puller
from block_store.transfer.source_client import SourceClient
from block_store.transfer.transport import GrpcTransport
from common.errors import FailedPrecondition
from common.ticket import Ticket
from common.trust import Trust
from common.types import CacheQuota


class Pulls:
    """Pulls of one store."""

    def __init__(self, owner: ArenaOwner, trust: Trust) -> None:
        self._owner = owner
        self._trust = trust
        self._making = asyncio.Lock()
        self._arena_id = ""
        self._puller: Puller | None = None
        self._upkeep: asyncio.Task[None] | None = None

    async def pull(self, ticket: Ticket, source: str, quota: CacheQuota | None) -> Pulled:
        """Returns a local ticket for copies of the blocks (`Puller.pull`). Raises FailedPrecondition if there is no
        arena, or if its blocks are on a GPU.
        """
        puller = await self._puller_of(self._owner.arena)
        return await puller.pull(ticket, source, quota)

    async def close(self) -> None:
        """Ends the holder of pulled blocks."""
        puller, self._puller = self._puller, None
        if self._upkeep is not None:
            self._upkeep.cancel()
            with suppress(asyncio.CancelledError):
                await self._upkeep
        if puller is not None:
            await puller.close()

    async def _puller_of(self, arena: Arena | None) -> Puller:
        if arena is None:
            raise FailedPrecondition("there is no arena yet to pull blocks into")
        if arena.placement.memory is not Memory.HOST:
            raise FailedPrecondition("blocks cannot be pulled into the memory of a GPU yet")
        async with self._making:
            if self._puller is None or self._arena_id != arena.arena_id:
                await self.close()
                self._puller, self._arena_id = await self._make(arena), arena.arena_id
                self._upkeep = asyncio.create_task(self._puller.run())
            return self._puller

    async def _make(self, arena: Arena) -> Puller:
        needs = Needs(
            f"pull-{socket.gethostname()}-{arena.arena_id}", "pull", arena.layout, weights_bytes=0,
            peak_activation_bytes=0, max_model_len=0, floor_blocks=0,
        )  # fmt: skip
        attached = await asyncio.to_thread(Attached, arena, self._owner.redis_url, needs)
        sources = SourceClient(self._trust)
        return Puller(attached, sources, GrpcTransport(sources))
