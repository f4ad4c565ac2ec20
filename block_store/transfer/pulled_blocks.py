"""Finds or allocates, seals, hands over and releases the blocks of one pull in the ledger.

Every function that calls the ledger runs in the puller's one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

from block_store.errors import Exhausted, Fenced
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.codec import SealItem
from block_store.ledger.scripts import chunks
from common.group_need import blocks_of
from common.ticket import Ticket
from common.types import BlockRef

Name = TypeVar("Name")
"""The type of a source's names for its blocks."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull."""

    ticket: Ticket
    """A ticket of this arena."""
    num_pulled: int
    """Number of blocks that were copied."""
    num_found: int
    """Number of blocks that this arena already contained."""
    num_bytes: int
    num_tokens: int
    """Number of token positions that were copied, for at least one KV group."""


@dataclass(frozen=True, slots=True)
class Taken(Generic[Name]):
    """The blocks of this arena that were taken for the blocks of a source. Each block is counted once in
    `HeldBlocks`.
    """

    found: dict[Name, BlockRef]
    """For each of the source's blocks that is cached here, the local block."""
    fresh: dict[Name, BlockRef]
    """For each other block of the source, the local block that receives its bytes."""


def take(held: HeldBlocks, hashes: dict[Name, bytes]) -> Taken[Name] | None:
    """Takes references to the blocks that are cached here, and allocates the others. Takes nothing, and returns None,
    if there is no room.

    `hashes` has the prefix hash of each of the source's blocks; it is empty for a partial block.
    """
    full = [name for name, one in hashes.items() if one]
    present = held.present([hashes[name] for name in full])
    found: dict[Name, BlockRef] = {}
    try:
        for run in _runs(full, present):
            [refs] = held.acquire([[hashes[name] for name in run]])
            found.update(zip(run, refs, strict=False))
        missing = [name for name in hashes if name not in found]
        return Taken(found, dict(zip(missing, held.alloc(len(missing)), strict=True)))
    except BaseException as error:
        release_each(held, list(found.values()))
        if isinstance(error, Exhausted):
            return None
        raise


def _runs(names: Sequence[Name], present: Sequence[bool]) -> Iterator[list[Name]]:
    """Yields the runs of consecutive blocks that are present."""
    for is_present, run in groupby(zip(names, present, strict=True), lambda pair: pair[1]):
        if is_present:
            yield [name for name, _ in run]


def finish(
    held: HeldBlocks, ticket: Ticket, taken: Taken[BlockRef], items: Sequence[SealItem], digests: Sequence[int]
) -> Pulled:
    """Seals the copies, whose digests have been compared, and hands all blocks over to a new ticket. If a step fails,
    releases all blocks.
    """
    local, unsealed = dict(taken.found), dict(taken.fresh)
    counted: Counter[BlockRef] = Counter()
    try:
        fresh = list(taken.fresh)
        for part, names, made in zip(chunks(items), chunks(fresh), chunks(digests), strict=True):
            for ref, final in zip(names, held.seal(part, made), strict=True):
                local[ref] = final
                del unsealed[ref]
        counted.update(local.values())
        tables = tuple(tuple(tuple(local[ref] for ref in table) for table in branch) for branch in ticket.tables)
        times = Counter(ref for branch in tables for table in branch for ref in table)
        for ref in (times - counted).elements():  # a block that several tables name is counted once for each
            held.share([ref])
            counted[ref] += 1
        ticket_id = held.hand_over(tables)
    except BaseException:
        left = counted.elements() if counted else local.values()
        release_each(held, [*left, *unsealed.values()])
        raise
    copies = Ticket(held.arena.arena_id, ticket_id, tables, ticket.num_tokens)
    num_tokens = copied_tokens(ticket, taken.fresh.keys(), held.arena.layout.block_size)
    return Pulled(copies, len(items), len(taken.found), len(items) * held.arena.block_bytes, num_tokens)


def _numbered(table: Sequence[BlockRef], num_tokens: int, block_size: int) -> Iterator[tuple[int, BlockRef]]:
    """Yields a table's blocks with their numbers in the sequence. The last block is that of the last position."""
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
    """Returns the number of token positions of a ticket whose blocks, for at least one KV group, are among `copied`.
    Positions in blocks that branches share count once.
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
