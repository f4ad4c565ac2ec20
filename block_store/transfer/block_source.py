"""The sending side of a transfer: reads sealed blocks of this arena for a host whose ticket holds them.

Every method blocks; the service calls them in threads. Does not use gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from block_store.arena.arena import Arena, ref_arrays
from block_store.arena.header import HeaderState
from block_store.errors import Stale
from block_store.ledger.prefix_hash import HASH_BYTES
from block_store.ledger.scripts import LedgerScripts, chunks
from common.ticket import TicketId
from common.types import BlockRef

FRAME_BYTES = 1 << 20
"""Number of bytes of blocks in a message. Larger blocks take a message each."""
_NO_HASH = bytes(HASH_BYTES)


class BlockSource:
    """The blocks of one arena that tickets hold. Check a ticket with `authorize` before its blocks are read."""

    def __init__(self, arena: Arena, ledger: LedgerScripts) -> None:
        self.arena = arena
        self._ledger = ledger

    def keep(self, ticket: TicketId) -> None:
        """Extends the ticket's lease. Raises Gone."""
        self._ledger.keep(ticket)

    def authorize(self, ticket: TicketId, refs: Sequence[BlockRef]) -> None:
        """Checks that the ticket holds all of these blocks. Raises Gone or NotHolder."""
        for part in chunks(refs):
            self._ledger.check_readable(ticket, part)

    def prefix_hashes(self, refs: Sequence[BlockRef]) -> list[bytes]:
        """Returns the prefix hash of every block, or an empty one for a partial block. Raises Stale."""
        hashes = [self.arena.hashes[ref.block].tobytes() for ref in refs]
        if not self.arena.check_refs(refs):
            raise Stale("a block of the ticket was reallocated")
        return [b"" if one == _NO_HASH else one for one in hashes]

    def frames(self, refs: Sequence[BlockRef]) -> Iterator[tuple[int, Sequence[BlockRef]]]:
        """Yields the index and the blocks of every frame."""
        size = max(1, FRAME_BYTES // self.arena.block_bytes)
        for index in range(0, len(refs), size):
            yield index, refs[index : index + size]

    def read(self, refs: Sequence[BlockRef]) -> tuple[bytes, list[int]]:
        """Returns the bytes of the blocks, one after the other, and their digests.

        A digest is the one made when the block was sealed. If there is none (`Arena.seal_digests`), it is computed from
        the copy, and protects the bytes only on the way from here. Raises Stale if a block is not sealed, or does not
        have this generation before and after the copy.
        """
        ids, generations = ref_arrays(refs)
        if not self.arena.check(ids, generations) or (self.arena.states[ids] != HeaderState.SEALED).any():
            raise Stale("a block is not sealed in the requested generation")
        digests = self.arena.digests[ids].tolist()
        parts = [self.arena.read(ref.block) for ref in refs]
        if not self.arena.check(ids, generations):
            raise Stale("a block changed while it was read")
        made = [digest or xxhash.xxh3_64_intdigest(part) for digest, part in zip(digests, parts, strict=True)]
        return parts[0] if len(parts) == 1 else b"".join(parts), made
