"""Implements copy-on-write: a sequence writes in place only to a block that is not sealed and that no other sequence
uses.

Otherwise, a new block replaces the last entry of the sequence's table, and the source is kept until the copy has been
verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from block_store.holder.attach import Attached
from common.types import BlockRef
from engine.model_runner import ModelRunner
from engine.sequence import Sequence


class CopyOnWrite:
    """Decides which blocks one worker's running sequences must copy, and makes the copies."""

    def __init__(self, runner: ModelRunner, attached: Attached) -> None:
        self._runner = runner
        self._attached = attached  # its `held` is replaced at each renewal
        self._block_size = runner.layout.block_size
        self.num_groups = len(runner.layout.groups)
        """The number of KV groups. A position needs a block in each of them."""

    def needing_block(self, live: Seq[Sequence]) -> list[Sequence]:
        """Returns the live sequences of a group that need another block for their next position. Of k sequences that
        share an unsealed block, k - 1 copy it and the last one keeps it.
        """
        size = self._block_size  # in most steps, most sequences have room, so this check must be fast
        found = [s for s in live if s.tail_sealed or (s.num_computed % size == 0 and self._is_full(s))]
        if len(live) == 1 or len(found) == len(live):  # different groups share only sealed blocks
            return found
        leaving = Counter(s.copy_from[0] for s in live if s.copy_from)  # sources of a step that did not run
        needing_block: list[Sequence] = []
        for sequence in live:
            if sequence in found:
                needing_block.append(sequence)
            elif self._attached.held.count(tail := sequence.table[-1]) - leaving[tail] > 1:
                leaving[tail] += 1
                needing_block.append(sequence)
        return needing_block

    def give(self, sequence: Sequence, fresh: Seq[BlockRef]) -> None:
        """Adds one block per KV group to a sequence for its next position. If the last blocks are not full, the new
        blocks replace them, and the content of the last blocks must then be copied.
        """
        if self._is_full(sequence):
            self.append(sequence, fresh)
            return
        sequence.copy_from = tuple(table[-1] for table in sequence.tables)
        for table, ref in zip(sequence.tables, fresh, strict=True):
            table[-1] = ref
        sequence.tail_sealed = False

    def append(self, sequence: Sequence, fresh: Seq[BlockRef]) -> None:
        """Appends one block per KV group to a sequence's tables."""
        for table, ref in zip(sequence.tables, fresh, strict=True):
            table.append(ref)

    def copy(self, copying: Seq[Sequence]) -> None:
        """Makes all copies of the step in one call. The sources are held until `copied` is called."""
        if copying:
            sources = [ref.block for s in copying for ref in s.copy_from]
            self._runner.copy_blocks(sources, [table[-1].block for s in copying for table in s.tables])

    def copied(self, copying: Seq[Sequence]) -> None:
        """Releases the sources of the copies. The caller must have applied the reader rule after making them."""
        if not copying:
            return
        self._attached.held.release_many([[ref] for sequence in copying for ref in sequence.copy_from])
        for sequence in copying:
            sequence.copy_from = ()

    def _is_full(self, sequence: Sequence) -> bool:
        return sequence.num_computed // self._block_size == len(sequence.table)
