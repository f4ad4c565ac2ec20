"""The sending side of a transfer, which reads sealed blocks of this arena for a host whose ticket holds them.

The methods block, so callers run them in threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from block_store.arena.arena import Arena, ref_arrays
from block_store.arena.header import HeaderState
from block_store.errors import Gone, Stale
from block_store.ledger.prefix_hash import HASH_BYTES
from block_store.ledger.scripts import CHUNK, LedgerScripts, chunks
from block_store.transfer import frames
from block_store.transfer.known_tickets import KnownTickets
from common.ticket import TicketId
from common.types import BlockRef

FRAME_BYTES = 1 << 20
"""Maximum number of bytes of blocks in a frame of a byte channel. Larger blocks take a frame each."""
MESSAGE_BYTES = 4 << 20
"""Maximum number of bytes of blocks in a message of `ReadBlocks`, whose fixed costs are higher."""
_NO_HASH = bytes(HASH_BYTES)
_SEALED = np.uint8(HeaderState.SEALED)
"""The state without its enumeration, which numpy compares in a third of the time."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The bytes and digests of blocks that are being copied."""

    pieces: Sequence[bytes | memoryview]
    """The bytes of all blocks, in order. A piece may hold several blocks."""
    digests: npt.NDArray[np.uint64]
    """The digest of each block."""


class Part(NamedTuple):
    """The blocks of one frame."""

    first: int
    """Position of the first block in the request's table."""
    refs: Sequence[BlockRef]
    is_confirmed: bool
    """Whether the ledger has confirmed the ticket. If not, the ledger has found the blocks in it earlier, and `confirm`
    must succeed before the frame counts.
    """


class BlockSource:
    """A reader of one arena's blocks for the owners of tickets."""

    def __init__(self, arena: Arena, ledger: LedgerScripts, known: KnownTickets) -> None:
        self.arena = arena
        self._ledger = ledger
        self._known = known

    def keep(self, ticket: TicketId, refs: Sequence[BlockRef]) -> list[bytes]:
        """Extends the ticket's lease. Returns the prefix hash of each block; the hash of a partial block is empty.
        Raises Gone if the ticket has ended, NotHolder if the ticket lacks a block, and Stale if a block was
        reallocated.
        """
        for part in chunks(refs) if refs else [refs]:
            self._keep(ticket, part)
        return self.prefix_hashes(refs)

    def _keep(self, ticket: TicketId, refs: Sequence[BlockRef]) -> None:
        """Extends the ticket's lease. Raises Gone if the ticket has ended, and NotHolder if it lacks one of `refs`."""
        if refs and not self._known.has(ticket, refs):
            self._find(ticket, refs)
        else:
            self.confirm(ticket)

    def _find(self, ticket: TicketId, refs: Sequence[BlockRef]) -> None:
        self._ledger.keep(ticket, refs)
        self._known.add(ticket, refs)

    def confirm(self, ticket: TicketId) -> None:
        """Extends the ticket's lease. Raises Gone if the ticket has ended; nothing of it is known from then on."""
        try:
            self._ledger.keep(ticket)
        except Gone:
            self._known.forget(ticket)
            raise

    def prefix_hashes(self, refs: Sequence[BlockRef]) -> list[bytes]:
        """Returns the prefix hash of each block; the hash of a partial block is empty. Raises Stale if a block was
        reallocated.
        """
        hashes = [self.arena.hashes[ref.block].tobytes() for ref in refs]
        if not self.arena.check_refs(refs):
            raise Stale("a block of the ticket was reallocated")
        return [b"" if one == _NO_HASH else one for one in hashes]

    def sealed_digests(self, ticket: TicketId, refs: Sequence[BlockRef]) -> list[int]:
        """Returns the digests that were computed when the blocks were sealed. Extends the ticket's lease. Raises Gone
        if the ticket has ended, NotHolder if the ticket lacks a block, and Stale if a block was reallocated or is not
        sealed.
        """
        for part in chunks(refs):
            self._keep(ticket, part)
        self._check_sealed(*ref_arrays(refs))
        digests: list[int] = self.arena.digests[ref_arrays(refs)[0]].tolist()
        return digests

    def frames(self, ticket: TicketId, refs: Sequence[BlockRef]) -> Iterator[bytes]:
        """Yields the blocks in serialized frames. Checks the ticket before the first frame, and again after every CHUNK
        blocks. Raises the errors of `parts`, `confirm` and `read`.
        """
        for part in self.parts(ticket, refs, MESSAGE_BYTES):
            if not part.is_confirmed:  # a message cannot be taken back
                self.confirm(ticket)
            yield self.read(part.first, part.refs)

    def parts(self, ticket: TicketId, refs: Sequence[BlockRef], frame_bytes: int = FRAME_BYTES) -> Iterator[Part]:
        """Yields the blocks of each frame, once the ledger has found them in the ticket. Before every CHUNK blocks, the
        ticket is confirmed here, or by the caller if `is_confirmed` is False. A confirmation extends the lease. Raises
        Gone if the ticket has ended, and NotHolder if it lacks a block.
        """
        size = max(1, min(CHUNK, frame_bytes // self.arena.block_bytes))
        for chunk_first in range(0, len(refs), CHUNK):
            chunk = refs[chunk_first : chunk_first + CHUNK]
            if not (is_known := self._known.has(ticket, chunk)):
                self._find(ticket, chunk)
            for first in range(0, len(chunk), size):
                yield Part(chunk_first + first, chunk[first : first + size], first > 0 or not is_known)

    def read(self, index: int, refs: Sequence[BlockRef]) -> bytes:
        """Returns a serialized frame (`frames`) with the blocks and their digests. `index` is the position of the first
        block in the ticket's table. Raises Stale as `reading` does.
        """
        with self.reading(refs) as reading:
            return frames.encode(index, reading.pieces, reading.digests.tolist())

    @contextmanager
    def reading(self, refs: Sequence[BlockRef]) -> Iterator[Reading]:
        """Yields the blocks, which the body of the `with` statement copies. A block's digest was computed when the
        block was sealed. If the block has none (`Arena.seal_digests`), a digest of the copy is sent, which protects the
        bytes only during the transfer. Raises Stale if a block is not sealed, or does not have this generation before
        and after the body.
        """
        ids, generations = ref_arrays(refs)
        self._check_sealed(ids, generations)
        digests = self.arena.digests[ids]
        pieces: Sequence[bytes | memoryview]
        if digests.all():
            pieces = self.arena.views(ids)
        else:  # copies, so that the digests match the bytes that are sent
            pieces = [bytes(self.arena.view(ref.block)) for ref in refs]
            pairs = zip(digests.tolist(), pieces, strict=True)
            digests = np.array([digest or xxhash.xxh3_64_intdigest(block) for digest, block in pairs], np.uint64)
        yield Reading(pieces, digests)
        if not self.arena.check(ids, generations):
            raise Stale("a block changed while it was read")

    def _check_sealed(self, ids: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]) -> None:
        if not self.arena.check(ids, generations) or (self.arena.states[ids] != _SEALED).any():
            raise Stale("a block is not sealed in the requested generation")
