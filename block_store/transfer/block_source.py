"""The sending side of a transfer: reads sealed blocks of this arena for a host whose ticket holds them.

Every method blocks; the service calls them in threads. Does not use gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from block_store.arena.arena import Arena, ref_arrays
from block_store.arena.header import HeaderState
from block_store.errors import Stale
from block_store.ledger.prefix_hash import HASH_BYTES
from block_store.ledger.scripts import LedgerScripts, chunks
from block_store.transfer import frames
from common.ticket import TicketId
from common.types import BlockRef

FRAME_BYTES = 4 << 20
"""Maximum number of bytes of blocks in a message. A larger block is sent in a separate message."""
_NO_HASH = bytes(HASH_BYTES)


class BlockSource:
    """A reader of the blocks of one arena that tickets hold."""

    def __init__(self, arena: Arena, ledger: LedgerScripts) -> None:
        self.arena = arena
        self._ledger = ledger

    def keep(self, ticket: TicketId, refs: Sequence[BlockRef]) -> list[bytes]:
        """Extends the ticket's lease. Returns the prefix hash of each block; the hash of a partial block is empty.
        Raises Gone, NotHolder or Stale.
        """
        self._ledger.keep(ticket)
        self.authorize(ticket, refs)
        return self.prefix_hashes(refs)

    def authorize(self, ticket: TicketId, refs: Sequence[BlockRef]) -> None:
        """Checks that the ticket holds all of these blocks. Raises Gone or NotHolder."""
        for part in chunks(refs):
            self._ledger.check_readable(ticket, part)

    def prefix_hashes(self, refs: Sequence[BlockRef]) -> list[bytes]:
        """Returns the prefix hash of each block; the hash of a partial block is empty. Raises Stale."""
        hashes = [self.arena.hashes[ref.block].tobytes() for ref in refs]
        if not self.arena.check_refs(refs):
            raise Stale("a block of the ticket was reallocated")
        return [b"" if one == _NO_HASH else one for one in hashes]

    def frames(self, ticket: TicketId, refs: Sequence[BlockRef]) -> Iterator[bytes]:
        """Checks the ticket, and then yields the blocks in serialized frames. Raises Gone, NotHolder or Stale."""
        self.authorize(ticket, refs)
        size = max(1, FRAME_BYTES // self.arena.block_bytes)
        for index in range(0, len(refs), size):
            yield self.read(index, refs[index : index + size])

    def read(self, index: int, refs: Sequence[BlockRef]) -> bytes:
        """Returns a serialized frame (`frames`) with the blocks and their digests. `index` is the position of the first
        block in the ticket's table.

        A digest is the one that was computed when the block was sealed. If the block has no digest
        (`Arena.seal_digests`), the digest is computed from the copy, and protects the bytes only during the transfer.
        Raises Stale if a block is not sealed, or does not have this generation before and after the copy.
        """
        ids, generations = ref_arrays(refs)
        if not self.arena.check(ids, generations) or (self.arena.states[ids] != HeaderState.SEALED).any():
            raise Stale("a block is not sealed in the requested generation")
        digests = self.arena.digests[ids]
        blocks = [self.arena.view(ref.block) for ref in refs]
        if not digests.all():
            blocks = list(map(bytes, blocks))  # so that a digest made here is that of the bytes that are sent
            pairs = zip(digests.tolist(), blocks, strict=True)
            digests = np.array([digest or xxhash.xxh3_64_intdigest(block) for digest, block in pairs], np.uint64)
        frame = frames.encode(index, blocks, digests.tolist())
        if not self.arena.check(ids, generations):
            raise Stale("a block changed while it was read")
        return frame
