"""Transports, which copy the bytes of blocks from one host's arena into another host's arena.

A transport may still write into its destination after a transfer was cancelled or has failed. The receiving side
therefore calls `is_quiescent` before it releases the destination's blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from block_store.arena.arena import Arena, ref_arrays
from block_store.transfer.frames import Frame
from block_store.transfer.source_client import SourceClient
from common.errors import Aborted
from common.ticket import Ticket
from common.types import BlockRef


class Writing(Protocol):
    """A write into the arena that may still run."""

    def done(self) -> bool: ...


@dataclass(slots=True)
class Copy:
    """The record of a transfer of a source's blocks into blocks of this arena."""

    source: str
    """host:port of the source's block store."""
    ticket: Ticket
    """The ticket that holds the blocks at the source."""
    refs: Sequence[BlockRef]
    into: Sequence[BlockRef]
    """Blocks of `arena`, one for each of `refs`, whose header generations have been raised."""
    arena: Arena
    on_stored: Callable[[Sequence[int]], object] = field(default=lambda digests: None, repr=False)
    """Callback that runs in the storing thread with the digests of the next stored blocks, after they have been
    compared.
    """
    writing: Writing | None = field(default=None, repr=False)
    """The current or last write into the arena by a different thread; None if there has been none."""
    num_stored: int = 0
    """Number of blocks that have been stored, in the order of `into`."""

    def places(self, first: int, count: int) -> list[memoryview]:
        """Returns the memory of the next blocks, in order. Raises Aborted if the source sends other blocks."""
        into = self.into[first : first + count]
        if first != self.num_stored or not into or len(into) != count:
            raise Aborted(f"the source sent {count} blocks at {first} instead of {self.num_stored}")
        return self.arena.places(ref_arrays(into)[0])

    def accept(self, digests: Sequence[int]) -> None:
        """Compares the digests of the next blocks, whose bytes are in place. Raises Aborted if the bytes are not those
        that the source sealed.
        """
        into = self.into[self.num_stored : self.num_stored + len(digests)]
        if any(self.arena.digest(ref.block) != digest for ref, digest in zip(into, digests, strict=True)):
            raise Aborted("the bytes of a block differ from those that the source sealed")
        self.num_stored += len(into)
        self.on_stored(digests)

    def write(self, frame: Frame) -> None:
        """Stores the bytes of the next blocks and compares their digests. Raises Aborted if the source sent other
        blocks or wrong bytes.
        """
        places = self.places(frame.index, len(frame.digests))
        if len(frame.data) != sum(map(len, places)):
            raise Aborted(f"the source sent {len(frame.data)} bytes in {len(frame.digests)} blocks at {frame.index}")
        at = 0
        for place in places:
            place[:] = frame.data[at : at + len(place)]
            at += len(place)
        self.accept(frame.digests)


class Transport(Protocol):
    """The interface of a transport, which copies blocks from another host."""

    async def fetch(self, copy: Copy) -> None:
        """Copies all blocks, and returns when all of them have arrived and their digests are right.

        Raises Aborted if the source no longer has the blocks or the bytes are wrong, and Unavailable if the source does
        not answer.
        """
        ...

    def is_quiescent(self, copy: Copy) -> bool:
        """Returns whether nothing will be written to the destination any more. Call this only after `fetch` has ended,
        successfully or not.
        """
        ...

    async def close(self) -> None:
        """Closes connections. Must not be called while a copy is running."""
        ...


class GrpcTransport:
    """A transport that uses `BlockStoreService.ReadBlocks`. Only this process writes to the destination."""

    def __init__(self, sources: SourceClient) -> None:
        self._sources = sources

    async def fetch(self, copy: Copy) -> None:
        if not copy.refs:
            return
        loop = asyncio.get_running_loop()
        writing: asyncio.Future[None] | None = None
        async with aclosing(self._sources.read(copy.source, copy.ticket, copy.refs)) as frames:
            async for frame in frames:
                await _ended(writing)
                copy.writing = writing = loop.run_in_executor(None, copy.write, frame)
        await _ended(writing)
        if copy.num_stored != len(copy.refs):
            raise Aborted(f"the source sent {copy.num_stored} of {len(copy.refs)} blocks")

    def is_quiescent(self, copy: Copy) -> bool:
        return copy.writing is None or copy.writing.done()

    async def close(self) -> None:
        """Does nothing, because the connections belong to the `SourceClient`."""


async def _ended(writing: asyncio.Future[None] | None) -> None:
    """Waits for a write into the arena. Cancelling the wait does not end the write."""
    if writing is not None:
        await asyncio.shield(writing)
