"""Finds the longest cached prefix from which every KV group of a model can continue, and takes references to its
blocks.

A group with full attention needs all blocks of the prefix. A group with a window needs only the blocks that the next
position still reads (`Retention.first_needed`).

    full     x x x x x x x .      7 blocks from the start
    window   . . x x . x x .      reads 2 blocks back: usable at 4 and at 7 blocks, so 7 is taken
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.prefix_hash import group_hash
from common.types import BlockRef, KvLayout


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The blocks of a cached prefix. The sequence that will continue the prefix has a reference to each of them."""

    num_blocks: int
    """Length of the prefix in blocks."""
    tables: list[list[BlockRef]]
    """For each KV group, the blocks that the group needs, which are the last ones of the prefix."""

    @classmethod
    def nothing(cls, layout: KvLayout) -> CachedPrefix:
        return cls(0, [[] for _ in layout.groups])


def find_prefix(held: HeldBlocks, hashes: Sequence[bytes], layout: KvLayout) -> CachedPrefix:
    """Returns the longest usable cached prefix of a sequence, and takes references to its blocks. `hashes` contains the
    hashes of the sequence's full blocks for KV group 0. If the ledger stops answering, the prefix may be shorter than
    the longest one, or empty.
    """
    rules = layout.rules()
    windowed = {number for number, group in enumerate(rules.groups) if group.slides}
    named = [[group_hash(one, group) for one in hashes] for group in range(len(layout.groups))]
    full = [hashes_of for group, hashes_of in enumerate(named) if group not in windowed]
    found = iter(held.acquire(full) if full else ())
    tables = [[] if group in windowed else next(found) for group in range(len(named))]
    reach = min((len(tables[group]) for group in range(len(named)) if group not in windowed), default=len(hashes))
    if not windowed:
        return CachedPrefix(reach, tables)
    present = {group: held.present(named[group][:reach]) for group in windowed}
    length = rules.usable_length(present)
    return _with_windows(held, tables, {group: named[group][:length] for group in windowed}, layout)


def _with_windows(
    held: HeldBlocks, tables: list[list[BlockRef]], named: dict[int, list[bytes]], layout: KvLayout
) -> CachedPrefix:
    """Takes references to the blocks of a prefix that the groups with a window need. `named` contains, for each of
    these groups, the hashes of all blocks of the prefix. If one of the needed blocks is no longer available, releases
    all references and returns an empty prefix.
    """
    length = len(next(iter(named.values())))
    rules = layout.rules()
    wanted = {group: hashes[rules.first_needed(group, length) :] for group, hashes in named.items()}
    [refs] = held.acquire([[one for hashes in wanted.values() for one in hashes]])
    if len(refs) < sum(map(len, wanted.values())):
        held.release_many([refs, *tables])
        return CachedPrefix.nothing(layout)
    held.release_many(table[length:] for table in tables)
    left = iter(refs)
    parts = {group: [next(left) for _ in hashes] for group, hashes in wanted.items()}
    return CachedPrefix(length, [parts.get(group, table[:length]) for group, table in enumerate(tables)])
