"""Transports copy the bytes of blocks from one host's arena into another's. gRPC is the only transport so far.

A one-sided transport (RDMA) may still write into its destination after a transfer was cancelled or has failed. The
receiving side therefore asks `is_quiescent` before it gives the destination's blocks to another holder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from block_store.arena.arena import Arena
from block_store.transfer.frames import Frame
from block_store.transfer.source_client import SourceClient
from common.errors import Aborted
from common.ticket import Ticket
from common.types import BlockRef


@dataclass(slots=True)
class Copy:
    """A transfer of a source's blocks into blocks of this arena."""

    source: str
    """host:port of the source's block store."""
    ticket: Ticket
    """The ticket that holds the blocks at the source."""
    refs: Sequence[BlockRef]
    into: Sequence[BlockRef]
    """Blocks of `arena`, one for each of `refs`, whose header generations have been raised."""
    arena: Arena
    writing: asyncio.Future[None] | None = field(default=None, repr=False)
    """The store into the arena that is under way or has ended."""
    digests: list[int] = field(default_factory=list, repr=False)
    """The digests of the blocks that have been stored, in the order of `into`. They have been compared."""

    def write(self, frame: Frame) -> None:
        """Stores the bytes of the next blocks and compares their digests. Raises Aborted if the bytes are not those
        that the source sealed.
        """
        into = self.into[frame.index : frame.index + len(frame.digests)]
        if len(into) != len(frame.digests) or len(frame.data) != len(into) * self.arena.block_bytes:
            raise Aborted(f"the source sent {len(frame.data)} bytes in {len(frame.digests)} blocks at {frame.index}")
        rows = np.frombuffer(frame.data, np.uint8).reshape(len(into), self.arena.block_bytes)
        for ref, row, digest in zip(into, rows, frame.digests, strict=True):
            self.arena.data[ref.block] = row
            if self.arena.digest(ref.block) != digest:
                raise Aborted("a block arrived with other bytes than the source sealed")
        self.digests += frame.digests


class Transport(Protocol):
    """The interface of a transport, which copies blocks from another host."""

    async def fetch(self, copy: Copy) -> None:
        """Copies all blocks, and returns when all of them have arrived, their digests are right and `copy.digests` has
        all of them.

        Raises Aborted if the source no longer has the blocks or if bytes are wrong, and Unavailable if the source does
        not answer.
        """
        ...

    def is_quiescent(self, copy: Copy) -> bool:
        """Returns whether nothing will be written to the destination any more. Call this only after `fetch` has ended,
        successfully or not.
        """
        ...


class GrpcTransport:
    """A transport that uses `BlockStoreService.ReadBlocks`. This process makes all stores, so nothing can be written
    once its thread has finished.
    """

    def __init__(self, sources: SourceClient) -> None:
        self._sources = sources

    async def fetch(self, copy: Copy) -> None:
        if not copy.refs:
            return
        loop, num_received = asyncio.get_running_loop(), 0
        async with aclosing(self._sources.read(copy.source, copy.ticket, copy.refs)) as frames:
            async for frame in frames:
                if frame.index != num_received:
                    raise Aborted(f"the source sent block {frame.index} instead of {num_received}")
                await self._written(copy)
                copy.writing = loop.run_in_executor(None, copy.write, frame)
                num_received += len(frame.digests)
        await self._written(copy)
        if num_received != len(copy.refs):
            raise Aborted(f"the source sent {num_received} of {len(copy.refs)} blocks")

    def is_quiescent(self, copy: Copy) -> bool:
        return copy.writing is None or copy.writing.done()

    async def _written(self, copy: Copy) -> None:
        """Waits for the store that is under way. A cancelled wait does not end the store."""
        if copy.writing is not None:
            await asyncio.shield(copy.writing)
