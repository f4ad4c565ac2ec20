"""The transport over NIXL, which reads blocks from the source's memory over RDMA.

The source says where its blocks are (`LocateBlocks`), and does not notice the reads. After each read, the receiver
therefore asks the source to compare the generations again (`KeepTicket`), and compares the digests. A copy that has
failed or was cancelled is quiescent once the agent has reported that its read is complete, or has died (`nixl_agent`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from block_store.arena.writer_slots import WriterSlot
from block_store.transfer import nixl_agent
from block_store.transfer.nixl_agent import NixlAgent
from block_store.transfer.source_client import Located, SourceClient
from block_store.transfer.transport import Copy, Transport
from common.errors import Aborted, FailedPrecondition, Unavailable, Unimplemented
from common.telemetry import Fallbacks

WINDOW_BYTES = 64 << 20
WINDOW_BLOCKS = 1024
"""Maximum numbers of bytes and blocks of a read."""
logger = logging.getLogger("nixl")


class NixlTransport:
    """A transport over NIXL. If an agent cannot be used, `otherwise` copies the blocks."""

    def __init__(
        self, sources: SourceClient, otherwise: Transport, agent: NixlAgent, slot: Callable[[], WriterSlot]
    ) -> None:
        """`agent` has registered the arena. `slot` returns the current writer slot of the holder of pulled blocks."""
        self._sources = sources
        self._otherwise = otherwise
        self._agent = agent
        self._slot = slot
        self._known: set[str] = set()
        self.fallbacks = Fallbacks(logger)

    async def fetch(self, copy: Copy) -> None:
        if not copy.refs:
            return
        located = await self._locate(copy)
        if located is None:
            return await self._otherwise.fetch(copy)
        size = max(1, min(WINDOW_BLOCKS, WINDOW_BYTES // located.block_bytes))
        for first in range(0, len(copy.refs), size):
            await self._fetch_window(copy, located, slice(first, first + size))

    def is_quiescent(self, copy: Copy) -> bool:
        return copy.writing is None or copy.writing.done()

    async def close(self) -> None:
        """Closes the other transport. The agent belongs to the store."""
        await self._otherwise.close()

    async def _locate(self, copy: Copy) -> Located | None:
        """Returns where the blocks are, or None if the copy must use the other transport."""
        if not self._agent.is_mapped:
            self.fallbacks.note("blocks not over NIXL", "the agent of this store is starting")
            return None
        try:
            located = await self._sources.locate(copy.source, copy.ticket, copy.refs)
        except (FailedPrecondition, Unimplemented) as error:
            self.fallbacks.note("blocks not over NIXL", f"{copy.source}: {error}")
            return None
        if located.block_bytes != copy.arena.block_bytes or len(located.digests) != len(copy.refs):
            raise Aborted(f"the source described {len(located.digests)} blocks of {located.block_bytes} bytes")
        if copy.source not in self._known:
            self._known.add(copy.source)
            logger.info("blocks of %s are read over NIXL", copy.source)
        return located

    async def _fetch_window(self, copy: Copy, located: Located, window: slice) -> None:
        refs, into = copy.refs[window], copy.into[window]
        addresses = [located.address + ref.block * located.block_bytes for ref in refs]
        copy.writing = read = self._agent.read(located.agent, addresses, [ref.block for ref in into], self._slot())
        await asyncio.wait({read}, timeout=nixl_agent.READ_S)  # does not cancel the read if it is cancelled
        if not read.done():
            raise Unavailable("the source of the blocks does not answer", retry_after_s=1.0)
        read.result()
        # No process of the source has seen the read: a block may have been reallocated before or during it.
        await self._sources.prefix_hashes(copy.source, copy.ticket, refs)
        copy.writing = asyncio.get_running_loop().run_in_executor(None, copy.accept, located.digests[window])
        await asyncio.shield(copy.writing)
