"""Copies blocks back from disk into an arena, where workers find them under their prefix hashes.

During the restore, the needed blocks that are already in the arena are held, so that they are not evicted to make room
for other blocks. Afterwards, these blocks and the restored ones are released, and are then usually cached. Call
`restore`, which does blocking I/O, in one thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from block_store.arena.arena import Arena
from block_store.disk.block_file import BlockFile
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import group_hash
from block_store.ledger.scripts import chunks
from block_store.transfer.pulled_blocks import release_each, take
from common.types import BlockRef, CacheQuota

logger = logging.getLogger("disk")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The hashes of a prompt's full blocks, and the quota against which the blocks after the public blocks count."""

    hashes: Sequence[bytes]
    """The hashes of the chain, which are the prefix hashes of KV group 0."""
    quota: CacheQuota | None = None
    """The quota of the prompt's tenant, or None if the tenant has no quota."""
    num_public: int = 0
    """Number of leading blocks that count against no quota."""

    def of_group(self, group: int) -> list[bytes]:
        return [group_hash(one, group) for one in self.hashes]

    def quota_of(self, block: int) -> CacheQuota | None:
        return None if block < self.num_public else self.quota


def is_on_disk(file: BlockFile, prefix: Prefix) -> bool:
    """Returns whether any block of the prefix in KV group 0 is on disk. Does not block."""
    return any(one in file for one in prefix.hashes)


def restore(held: HeldBlocks, file: BlockFile, prefix: Prefix) -> int:
    """Restores the missing blocks of the longest prefix that is usable with the blocks in the arena and on disk. Stops
    at the first block that cannot be read from disk. Returns the number of blocks that came from disk, which is 0 if
    there is no room for all of them, or if the blocks on disk do not make the prefix longer. Can raise the errors of
    `HeldBlocks.seal`, and any other LedgerError.
    """
    wanted = _wanted(held, file, prefix)
    if not wanted or (taken := take(held, {one: one for one in wanted})) is None:
        return 0
    counted = {**taken.found, **taken.fresh}
    try:
        digests = dict(_read(held.arena, file, taken.fresh))
        for part in chunks(list(digests)):
            items = [SealItem(taken.fresh[one], one, wanted[one]) for one in part]
            counted.update(zip(part, held.seal(items, [digests[one] for one in part]), strict=True))
        return len(digests)
    finally:
        release_each(held, list(counted.values()))


def _wanted(held: HeldBlocks, file: BlockFile, prefix: Prefix) -> dict[bytes, CacheQuota | None]:
    """Returns the hashes and quotas of the blocks, of all KV groups, that the longest usable prefix needs. The result
    is empty if the blocks on disk do not make the prefix longer.
    """
    rules = held.arena.layout.rules()
    named = {group: prefix.of_group(group) for group in range(len(rules.groups))}
    every = [one for hashes in named.values() for one in hashes]
    cached = set(compress(every, held.present(every)))
    in_arena = {group: [one in cached for one in hashes] for group, hashes in named.items()}
    in_either = {group: [one in cached or one in file for one in hashes] for group, hashes in named.items()}
    length = rules.usable_length(in_either)
    if length <= rules.usable_length(in_arena):
        return {}
    return {
        hashes[block]: prefix.quota_of(block)
        for group, hashes in named.items()
        for block in range(rules.first_needed(group, length), length)
    }


def _read(arena: Arena, file: BlockFile, into: Mapping[bytes, BlockRef]) -> Iterator[tuple[bytes, int]]:
    """Reads blocks into the arena. Yields the hash and the digest of each block that was read. Stops at the first
    missing or damaged block.
    """
    file.read_ahead(into)
    blocks = arena.data
    copy = None if isinstance(blocks, np.ndarray) else np.empty(arena.block_bytes, np.uint8)
    for one, ref in into.items():
        if (digest := file.read_into(one, blocks[ref.block] if copy is None else copy)) is None:
            logger.warning("a block on disk is missing or has wrong bytes; it is computed again")
            return
        if copy is not None:  # the blocks are in device memory
            blocks.write(ref.block, copy.tobytes())
        yield one, digest
