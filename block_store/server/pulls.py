"""Pulls of blocks from other stores into this store's arena. The first pull creates the arena's puller."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from block_store.arena.arena import Arena
from block_store.arena.header import Memory
from block_store.errors import BlockStoreError
from block_store.holder.attach import Attached, Needs
from block_store.ledger.inspection import inspect
from block_store.ledger.scripts import LedgerScripts
from block_store.server.arena_owner import ArenaOwner
from block_store.transfer.byte_transport import ByteTransport
from block_store.transfer.nixl_agent import NixlAgent
from block_store.transfer.nixl_transport import NixlTransport
from block_store.transfer.pulled_blocks import Pulled
from block_store.transfer.puller import MAX_PULLS, Puller
from block_store.transfer.source_client import SourceClient
from block_store.transfer.transport import GrpcTransport, Transport
from common.errors import FailedPrecondition, Unavailable
from common.ticket import Ticket
from common.trust import Trust
from common.types import CacheQuota


class Pulls:
    """The entry point for pulls into a store's arena. All pulls share one puller."""

    def __init__(self, owner: ArenaOwner, trust: Trust, nixl: NixlAgent | None = None) -> None:
        """`nixl` is the agent that reads the blocks; None if they do not travel over NIXL."""
        self._owner = owner
        self._nixl = nixl
        self._trust = trust
        self._making: asyncio.Task[Puller] | None = None
        """The task that creates the puller. All pulls wait for this task. After a failure, the next pull starts another
        one.
        """
        self._upkeep: asyncio.Task[None] | None = None

    async def pull(
        self, ticket: Ticket, source: str, quota: CacheQuota | None = None, public_tokens: int = 0
    ) -> Pulled:
        """Returns a local ticket for copies of the blocks (`Puller.pull`). Raises FailedPrecondition if there is no
        arena or its blocks are on a GPU, Unavailable if the holder of pulled blocks cannot register, and the errors of
        `Puller.pull`.
        """
        puller = await self._puller_of(self._owner.arena, self._owner.ledger)
        return await puller.pull(ticket, source, quota, public_tokens)

    @asynccontextmanager
    async def early(
        self, ticket: Ticket, source: str, quota: CacheQuota | None = None, public_tokens: int = 0
    ) -> AsyncIterator[int]:
        """Copies and holds blocks of a prompt that is still being computed (`Puller.early`). Raises the errors of
        `pull` and of `Puller.early`.
        """
        puller = await self._puller_of(self._owner.arena, self._owner.ledger)
        async with puller.early(ticket, source, quota, public_tokens) as num_tokens:
            yield num_tokens

    async def close(self) -> None:
        """Ends the holder of pulled blocks."""
        if self._making is None:
            return
        if self._upkeep is not None:
            self._upkeep.cancel()
        with suppress(BlockStoreError, OSError):
            puller = await self._making
            await puller.close()

    async def _puller_of(self, arena: Arena | None, ledger: LedgerScripts | None) -> Puller:
        if arena is None or ledger is None:
            raise FailedPrecondition("there is no arena yet to pull blocks into")
        if arena.memory is not Memory.HOST:
            raise FailedPrecondition("blocks cannot be pulled into the memory of a GPU yet")
        if self._making is None or _has_failed(self._making):
            self._making = asyncio.create_task(self._make(arena, ledger))
        try:
            return await asyncio.shield(self._making)
        except (BlockStoreError, OSError) as error:
            raise Unavailable(f"the holder of pulled blocks cannot register: {error}", retry_after_s=1.0) from error

    async def _make(self, arena: Arena, ledger: LedgerScripts) -> Puller:
        """Registers the holder of pulled blocks, and returns its puller. The holder's floor is the smallest floor of a
        worker, if that still fits into the arena. If a single decode worker and no prefill worker uses the arena, every
        group that the worker accepts can then be pulled, even if the worker uses all blocks outside this floor.
        """
        holders = (await asyncio.to_thread(inspect, ledger, False)).holders
        floor = min((holder.floor for holder in holders if holder.floor), default=0)
        needs = Needs(
            f"pull-{socket.gethostname()}-{arena.arena_id}", "pull", arena.layout, weights_bytes=0,
            peak_activation_bytes=0, max_model_len=0, floor_blocks=0,
        )  # fmt: skip
        sources = SourceClient(self._trust)
        transport: Transport = ByteTransport(sources, GrpcTransport(sources), MAX_PULLS, self._trust)
        if self._nixl is not None:
            with suppress(Unavailable):  # the agent is starting; until then, blocks travel over byte channels
                await self._nixl.use(arena)
            transport = NixlTransport(sources, transport, self._nixl, lambda: attached.held.writer_slot)
        attached = await asyncio.to_thread(Attached, arena, self._owner.redis_url, needs, floor)
        puller = Puller(attached, sources, transport)
        self._upkeep = asyncio.create_task(puller.run())
        return puller


def _has_failed(making: asyncio.Task[Puller]) -> bool:
    return making.done() and (making.cancelled() or making.exception() is not None)
