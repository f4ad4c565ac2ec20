"""The block table, which lists a sequence's blocks of one KV group in token order.

The head of a table is dropped once its positions have left the attention window. Dropped entries remain in the table
and name the first remaining block, so that a step may check and gather every entry. Attention does not read them.

    entry   0  1  2  3  4  5
    block   d  d  d  d  e  f      `first` is 3, `live` is [d, e, f]
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from common.types import BlockRef

_STAMPS = itertools.count(1)


class BlockTable(Sequence[BlockRef]):
    """A list of a sequence's blocks in token order, stored as two growing arrays, which a step can copy as a whole."""

    __slots__ = ("_blocks", "_generations", "first", "stamp")

    def __init__(self, refs: Iterable[BlockRef] = (), first: int = 0) -> None:
        """Creates a table of `first` dropped entries, followed by `refs`. If `first` > 0, `refs` must not be empty."""
        self._blocks = array("I")  # u32 block numbers
        self._generations = array("Q")  # u64 generations
        self.first = 0
        """Number of leading entries that have been dropped."""
        self.stamp = next(_STAMPS)
        """A number that changes whenever the table changes, and that no other table has."""
        for ref in refs:
            self.append(ref)
        if first:
            self._blocks = array("I", self._blocks[:1] * first) + self._blocks
            self._generations = array("Q", self._generations[:1] * first) + self._generations
            self.first = first

    @property
    def live(self) -> list[BlockRef]:
        """The blocks that have not been dropped."""
        return self[self.first :]

    def drop(self, first: int) -> list[BlockRef]:
        """Drops the entries before `first`, which must be less than the length. Returns the blocks of the newly dropped
        entries, for release.
        """
        if first <= self.first:
            return []
        dropped = self[self.first : first]
        block, generation = self[first]
        self._blocks[:first] = array("I", [block]) * first
        self._generations[:first] = array("Q", [generation]) * first
        self.first = first
        self.stamp = next(_STAMPS)
        return dropped

    def append(self, ref: BlockRef) -> None:
        self._blocks.append(ref.block)
        self._generations.append(ref.generation)
        self.stamp = next(_STAMPS)

    def copy(self) -> BlockTable:
        """Returns an independent table with the same blocks."""
        table = BlockTable()
        table.first = self.first
        table._blocks, table._generations = self._blocks[:], self._generations[:]
        return table

    def copy_to(self, blocks: npt.NDArray[np.int32], generations: npt.NDArray[np.uint64]) -> None:
        """Fills two arrays of equal length with the numbers and the generations of the table's first entries."""
        blocks[:] = np.frombuffer(self._blocks, np.uint32, len(blocks))
        generations[:] = np.frombuffer(self._generations, np.uint64, len(generations))

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> BlockRef: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockRef]: ...
    def __getitem__(self, index: int | slice) -> BlockRef | list[BlockRef]:
        if isinstance(index, slice):
            return list(map(BlockRef, self._blocks[index], self._generations[index]))
        return BlockRef(self._blocks[index], self._generations[index])

    def __setitem__(self, index: int, ref: BlockRef) -> None:
        """Replaces a live entry. If it is the first live entry, also updates the dropped entries, which name the same
        block.
        """
        index = range(len(self))[index]
        self._blocks[index], self._generations[index] = ref
        if index == self.first:
            self._blocks[:index] = array("I", [ref.block]) * index
            self._generations[:index] = array("Q", [ref.generation]) * index
        self.stamp = next(_STAMPS)

    def __iter__(self) -> Iterator[BlockRef]:
        return map(BlockRef, self._blocks, self._generations)
