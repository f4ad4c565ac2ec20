"""Converts changes of a tenant's cached blocks into the messages of SubscribeKvEvents."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from smg_grpc_proto.generated import common_pb2 as pb

from common.errors import InvalidArgument
from gateway.fleet.block_catalog import CatalogBlock, Changes

MOST_IN_BATCH = 1024
"""The largest number of blocks in one message, which keeps messages far below gRPC's limit of 4 MiB."""
_MOST_START = 1 << 62
T = TypeVar("T")


class EventBatches:
    """The sequence of one subscriber's messages. Their numbers continue from the number that the subscriber names.

    Messages are not kept for a replay. Instead, the first message tells the subscriber to forget its blocks, and all
    blocks follow.
    """

    def __init__(self, start_sequence_number: int) -> None:
        """Raises InvalidArgument if the number leaves no room for the following numbers."""
        if start_sequence_number > _MOST_START:
            raise InvalidArgument.of("start_sequence_number", f"must be at most 2^62, got {start_sequence_number}")
        self._number = start_sequence_number
        self._event_id = 0

    def of(self, changes: Changes) -> Iterator[pb.KvEventBatch]:
        """Yields the messages for `changes`, with at most `MOST_IN_BATCH` blocks each."""
        if changes.cleared:
            yield self._batch([pb.KvCacheEvent(cleared=pb.KvCacheCleared())])
        for part in _parts(changes.removed):
            yield self._batch([pb.KvCacheEvent(removed=pb.KvBlocksRemoved(block_hashes=map(_block_hash, part)))])
        for blocks in _parts(changes.stored):
            yield self._batch([pb.KvCacheEvent(stored=_stored(run)) for run in _runs(blocks)])

    def _batch(self, events: Iterable[pb.KvCacheEvent]) -> pb.KvEventBatch:
        self._number += 1
        batch = pb.KvEventBatch(sequence_number=self._number, timestamp=time.time(), events=events)
        for event in batch.events:
            self._event_id += 1
            event.event_id = self._event_id
        return batch


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), MOST_IN_BATCH):
        yield items[first : first + MOST_IN_BATCH]


def _runs(blocks: Sequence[CatalogBlock]) -> Iterator[list[CatalogBlock]]:
    """Yields the blocks in runs in which each block continues the block before it."""
    run: list[CatalogBlock] = []
    for block in blocks:
        if run and block.parent != run[-1].prefix_hash:
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _stored(run: Sequence[CatalogBlock]) -> pb.KvBlocksStored:
    blocks = [
        pb.KvBlock(
            block_hash=_block_hash(block.prefix_hash), token_ids=block.token_ids, block_size=len(block.token_ids)
        )
        for block in run
    ]
    parent = run[0].parent
    return pb.KvBlocksStored(blocks=blocks, parent_block_hash=None if parent is None else _block_hash(parent))


def _block_hash(prefix_hash: bytes) -> int:
    """Returns the first 8 bytes of a prefix hash as a signed number, by which messages identify the block."""
    return int.from_bytes(prefix_hash[:8], "big", signed=True)
