"""A client of the call SubscribeKvEvents, which applies the events as a router does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from smg_grpc_proto.generated import common_pb2 as pb

WITHIN_S = 60.0


class KvMirror:
    """The blocks that an endpoint has announced to one subscriber."""

    def __init__(self, stub: Any, key: str | None = None, start_sequence_number: int = 0) -> None:
        """Begins the call. `stub` is a stub of VllmEngine, and `key` is an API key, or None to send no key."""
        metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self.call = stub.SubscribeKvEvents(
            pb.SubscribeKvEventsRequest(start_sequence_number=start_sequence_number), metadata=metadata
        )
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """The parent and the token ids of each block."""
        self.batches: list[pb.KvEventBatch] = []
        self.num_cleared = 0
        self._number = start_sequence_number
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> KvMirror:
        """Starts to read the events, and waits for the first batch."""
        self._task = asyncio.create_task(self._read())
        await self.until(lambda: self.batches)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def until(self, good: Callable[[], Any]) -> None:
        """Waits until `good()` is true. Raises the stream's error, or AssertionError after `WITHIN_S`."""
        try:
            async with asyncio.timeout(WITHIN_S):
                while not good():
                    if self._task is not None and self._task.done():
                        self._task.result()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not so within {WITHIN_S:g} s: {len(self.blocks)} blocks") from None

    def prefix_len(self, token_ids: list[int]) -> int:
        """Returns the number of leading tokens of a prompt that the announced blocks contain."""
        found: int = 0
        parent: int | None = None
        while True:
            following = [
                block_hash
                for block_hash, (before, ids) in self.blocks.items()
                if before == parent and tuple(token_ids[found : found + len(ids)]) == ids
            ]
            if not following:
                return found
            [parent] = following
            found += len(self.blocks[parent][1])

    async def _read(self) -> None:
        async for batch in self.call:
            self._number += 1
            assert batch.sequence_number == self._number, "a gap makes a router subscribe again"
            self.batches.append(batch)
            for event in batch.events:
                self._apply(event)

    def _apply(self, event: pb.KvCacheEvent) -> None:
        if event.HasField("cleared"):
            self.blocks.clear()
            self.num_cleared += 1
        for block_hash in event.removed.block_hashes:
            del self.blocks[block_hash]
        parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
        assert parent is None or parent in self.blocks, "a router cannot place a block without its parent"
        for block in event.stored.blocks:
            assert block.block_size == len(block.token_ids) and block.block_hash not in self.blocks
            self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
            parent = block.block_hash
