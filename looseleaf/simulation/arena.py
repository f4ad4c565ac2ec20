"""Simulates an arena. Counts the blocks that are free, in use and cached, and records which prefixes are cached, but
stores no KV.

The rules are those of the ledger (docs/design.md): free blocks are taken before the coldest cached ones, no holder
takes blocks from the unused parts of other holders' floors, and a full block that is indexed already is used instead of
an equal new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

Key = Hashable


@dataclass(slots=True)
class Holder:
    """A worker or a ticket, with its floor and its number of references, in blocks."""

    floor: int = 0
    held: int = 0


@dataclass(slots=True)
class Table:
    """The blocks of one sequence. Blocks with a key, which are full and sealed, come before the others."""

    keys: list[Key] = field(default_factory=list)
    num_own: int = 0
    """Number of blocks without a key: not full, or not computed yet."""

    def __len__(self) -> int:
        return len(self.keys) + self.num_own


class Arena:
    """The blocks of one host."""

    def __init__(self, arena_id: str, num_blocks: int) -> None:
        self.arena_id = arena_id
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._num_own = 0
        self._references: dict[Key, int] = {}
        """Number of references to each indexed block."""
        self._cold: OrderedDict[Key, None] = OrderedDict()
        """The indexed blocks without references, coldest first."""
        self._holders: list[Holder] = []

    def join(self, floor: int) -> Holder:
        """Adds a worker with a floor."""
        self._holders.append(holder := Holder(floor))
        return holder

    @property
    def num_free(self) -> int:
        """Number of blocks that are neither in use nor cached."""
        return self.num_blocks - self._num_own - len(self._references)

    @property
    def num_cached(self) -> int:
        """Number of indexed blocks without references."""
        return len(self._cold)

    def available(self, holder: Holder) -> int:
        """Returns the number of blocks that a holder can get now."""
        kept = sum(max(0, other.floor - other.held) for other in self._holders if other is not holder)
        return max(0, self.num_free + len(self._cold) - kept)

    def num_found(self, keys: Sequence[Key]) -> int:
        """Returns the length of the longest indexed prefix of `keys`."""
        for place, key in enumerate(keys):
            if key not in self._references:
                return place
        return len(keys)

    def acquire(self, holder: Holder, keys: Sequence[Key]) -> list[Key]:
        """Adds a reference to each block of the longest indexed prefix of `keys`, and returns the prefix."""
        found = list(keys[: self.num_found(keys)])
        for key in found:
            self._references[key] += 1
            self._cold.pop(key, None)
        holder.held += len(found)
        return found

    def alloc(self, holder: Holder, num_blocks: int) -> bool:
        """Takes blocks, all or none, and returns whether it took them. Evicts cached blocks if necessary."""
        if num_blocks > self.available(holder):
            return False
        for _ in range(num_blocks - self.num_free):
            key, _ = self._cold.popitem(last=False)
            del self._references[key]
            self.num_evicted += 1
        self._num_own += num_blocks
        holder.held += num_blocks
        return True

    def seal(self, table: Table, key: Key) -> None:
        """Indexes the first block without a key. If `key` is indexed already, the indexed block is used instead."""
        table.keys.append(key)
        table.num_own -= 1
        self._num_own -= 1
        self._references[key] = self._references.get(key, 0) + 1
        self._cold.pop(key, None)

    def release(self, holder: Holder, table: Table) -> None:
        """Releases all blocks of a sequence. Full blocks without other references stay cached, and the last of them is
        evicted first.
        """
        holder.held -= len(table)
        self._num_own -= table.num_own
        for key in reversed(table.keys):
            self._references[key] -= 1
            if not self._references[key]:
                self._cold[key] = None
        table.keys, table.num_own = [], 0

    def release_own(self, holder: Holder, count: int) -> None:
        """Releases blocks without a key."""
        holder.held -= count
        self._num_own -= count

    @staticmethod
    def move(table: Table, source: Holder, destination: Holder) -> None:
        """Moves a sequence's references from one holder to another."""
        source.held -= len(table)
        destination.held += len(table)

    def check(self, tables: Iterable[Table]) -> None:
        """Raises AssertionError unless the references and the blocks in use are exactly those of `tables`."""
        listed = list(tables)
        counted: dict[Key, int] = {}
        for table in listed:
            for key in table.keys:
                counted[key] = counted.get(key, 0) + 1
        assert {key: n for key, n in self._references.items() if n} == counted, "references differ from block tables"
        assert self._num_own == sum(table.num_own for table in listed), "blocks of tables differ from those in use"
        assert set(self._cold) == {key for key, n in self._references.items() if not n}
        assert self.num_free >= 0
