"""The ledger operations of one pull, which find or allocate its blocks, seal them, hand them over, and release them.

In a pull, every function that calls the ledger runs in the puller's one thread. `disk.restore` uses some of the
functions as well.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from block_store.errors import BlockStoreError, Exhausted, Fenced
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.codec import SealItem
from block_store.ledger.lane import Attempt
from block_store.ledger.scripts import CHUNK
from common.group_need import blocks_of
from common.ticket import Ticket
from common.types import BlockRef

DELIVERED_BYTES = 16 << 20
"""Blocks are delivered as soon as there are this many bytes of them, or CHUNK blocks."""
DELIVER_S = 2.0
"""Interval in seconds after which even fewer blocks are delivered, to extend the lease of the local ticket."""
Name = TypeVar("Name")
"""The type of a source's names for its blocks."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull."""

    ticket: Ticket
    """A ticket of this arena."""
    num_pulled: int
    """Number of blocks that were copied, by this pull or by early pulls that still hold them."""
    num_found: int
    """Number of other blocks, which this arena already contained."""
    num_bytes: int
    """Number of bytes of the `num_pulled` blocks."""
    num_tokens: int
    """Number of token positions that were copied, for at least one KV group."""
    num_early_tokens: int
    """Number of those positions that early pulls copied."""


@dataclass(frozen=True, slots=True)
class Taken(Generic[Name]):
    """The record of the local blocks for a source's blocks. `HeldBlocks` counts each of them once."""

    found: dict[Name, BlockRef]
    """For each of the source's blocks that this arena already contained, the local block."""
    fresh: dict[Name, BlockRef]
    """For each other block of the source, the local block that receives its bytes."""


def take(held: HeldBlocks, hashes: dict[Name, bytes], spare: int = 0) -> Taken[Name] | None:
    """Takes references to the blocks that are already in this arena's prefix index, and allocates the others. Returns
    None, and takes nothing, if there is no room for the others and for `spare` more. `hashes` maps the name of each
    block at the source to its prefix hash, which is empty for a partial block.
    """
    full = [name for name, one in hashes.items() if one]
    present = held.present([hashes[name] for name in full])
    found: dict[Name, BlockRef] = {}
    try:
        for run in _runs(full, present):
            [refs] = held.acquire([[hashes[name] for name in run]])
            found.update(zip(run, refs, strict=False))
        missing = [name for name in hashes if name not in found]
        return Taken(found, dict(zip(missing, held.alloc(len(missing), spare), strict=True)))
    except BaseException as error:
        release_each(held, list(found.values()))
        if isinstance(error, Exhausted):
            return None
        raise


def _runs(names: Sequence[Name], present: Sequence[bool]) -> Iterator[list[Name]]:
    """Yields each run of consecutive names whose blocks are present."""
    for is_present, run in groupby(zip(names, present, strict=True), lambda pair: pair[1]):
        if is_present:
            yield [name for name, _ in run]


class Delivery:
    """The delivery of one pull's blocks to a ticket of this arena. Copies are sealed and delivered while later blocks
    arrive.
    """

    def __init__(
        self, held: HeldBlocks, ticket: Ticket, taken: Taken[BlockRef], items: Sequence[SealItem],
        early: Collection[BlockRef] = (),
    ) -> None:  # fmt: skip
        """Creates a delivery. `ticket` is the source's ticket. `items` describes `taken.fresh`, in the same order.
        `early` names the blocks of `taken.found` that early pulls have copied.
        """
        self._held = held
        self._ticket = ticket
        self._taken = taken
        self._items = items
        self._early = early
        self._local = dict(taken.found)
        """For each of the source's blocks that has been delivered or was found here, the local block."""
        self._digests: list[int] = []
        self._num_delivered = 0
        self._delivered_at = time.monotonic()
        self._attempt = Attempt()
        self._is_opened = False
        self._failure: BlockStoreError | None = None

    def store(self, digests: Sequence[int]) -> None:
        """Records the digests of the next blocks, which have been stored and compared. Delivers blocks if there are
        enough of them, or if the lease of the local ticket must be extended. If that fails, `finish` raises the error.
        """
        self._digests += digests
        waiting = len(self._digests) - self._num_delivered
        is_enough = waiting >= CHUNK or waiting * self._held.arena.block_bytes >= DELIVERED_BYTES
        is_due = time.monotonic() > self._delivered_at + DELIVER_S
        is_over = self._failure is not None or self._attempt.is_over  # a cancelled copy may still store a frame
        if not is_over and (is_enough or is_due):
            try:
                self._deliver()
            except BlockStoreError as error:
                self._failure = error

    def finish(self) -> Pulled:
        """Delivers the remaining blocks, and returns the result of the pull. If that fails, releases all blocks."""
        try:
            if self._failure is not None:
                raise self._failure
            self._deliver()
        except BaseException:
            self.abandon()
            self.release_fresh()
            raise
        return self._pulled()

    def abandon(self) -> None:
        """Ends the local ticket, and releases the blocks that were found here. Blocks that have not been delivered stay
        allocated until `release_fresh` is called.
        """
        self._held.forget(self._attempt)
        if not self._is_opened:
            release_each(self._held, list(self._taken.found.values()))

    def release_fresh(self) -> None:
        """Releases the blocks that have not been delivered. Those that `HeldBlocks.deliver` gave up with an error are
        not counted any more.
        """
        left = [item.ref for item in self._items[self._num_delivered :]]
        release_each(self._held, [ref for ref in left if self._held.count(ref)])

    def _deliver(self) -> None:
        if not self._is_opened and (self._taken.found or not self._items):
            self._held.hand_over([[list(self._taken.found.values())]], self._attempt)
        self._is_opened = True
        names = list(self._taken.fresh)
        while self._num_delivered < len(self._digests):
            part = slice(self._num_delivered, min(len(self._digests), self._num_delivered + CHUNK))
            refs = self._held.deliver(self._items[part], self._digests[part], self._attempt)
            self._local.update(zip(names[part], refs, strict=True))
            self._num_delivered += len(refs)
        self._delivered_at = time.monotonic()

    def _pulled(self) -> Pulled:
        arena, ticket, copied = self._held.arena, self._ticket, {*self._taken.fresh, *self._early}
        assert self._attempt.ticket is not None
        tables = tuple(tuple(tuple(self._local[ref] for ref in table) for table in branch) for branch in ticket.tables)
        copies = Ticket(arena.arena_id, self._attempt.ticket, tables, ticket.num_tokens)
        num_tokens, num_late = (
            copied_tokens(ticket, refs, arena.layout.block_size) for refs in (copied, self._taken.fresh)
        )
        num_found = len(self._taken.found) - len(self._early)
        num_bytes = len(copied) * arena.block_bytes
        return Pulled(copies, len(copied), num_found, num_bytes, num_tokens, num_tokens - num_late)


def _numbered(table: Sequence[BlockRef], num_tokens: int, block_size: int) -> Iterator[tuple[int, BlockRef]]:
    """Yields each block of the table with its number in the sequence. The last block contains the last position."""
    return enumerate(table, blocks_of(num_tokens, block_size) - len(table))


def leading_blocks(ticket: Ticket, num_tokens: int, block_size: int) -> set[BlockRef]:
    """Returns the blocks of a ticket that lie entirely within the first `num_tokens` tokens."""
    found: set[BlockRef] = set()
    for tables, branch_tokens in zip(ticket.tables, ticket.num_tokens, strict=True):
        for table in tables:
            numbered = _numbered(table, branch_tokens, block_size)
            found.update(ref for number, ref in numbered if number < num_tokens // block_size)
    return found


def copied_tokens(ticket: Ticket, copied: Collection[BlockRef], block_size: int) -> int:
    """Returns the number of token positions that have a block in `copied`, for at least one KV group. Positions in
    blocks that branches share count once.
    """
    seen: set[BlockRef] = set()
    total = 0
    for tables, num_tokens in zip(ticket.tables, ticket.num_tokens, strict=True):
        copied_here = set[int]()
        for table in tables:
            numbered = _numbered(table, num_tokens, block_size)
            copied_here.update(number for number, ref in numbered if ref in copied and ref not in seen)
        total += sum(min(block_size, num_tokens - number * block_size) for number in copied_here)
        seen.update(ref for table in tables for ref in table)
    return total


def release(held: HeldBlocks, taken: Taken[Name] | None) -> None:
    if taken is not None:
        release_each(held, [*taken.found.values(), *taken.fresh.values()])


def release_each(held: HeldBlocks, refs: Sequence[BlockRef]) -> None:
    with suppress(Fenced):  # the end of the holder has released everything
        held.release_many([[ref] for ref in refs])
