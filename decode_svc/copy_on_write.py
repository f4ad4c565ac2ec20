"""Copy-on-write: a sequence writes in place only into a block that is not sealed and that no other sequence uses.

Otherwise the last entry of its table is replaced by a new block, and the source is kept until the copy is known to be
good. All copies of a step are made in one call, in the step thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from block_store.holder.attach import Attached
from common.types import BlockRef
from engine.model_runner import ModelRunner
from engine.sequence import Sequence


class CopyOnWrite:
    """The copy-on-write of one worker's running sequences."""

    def __init__(self, runner: ModelRunner, attached: Attached) -> None:
        self._runner = runner
        self._attached = attached  # its `held` is replaced at each renewal
        self._block_size = runner.layout.block_size
        self.num_groups = len(runner.layout.groups)
        """The number of KV groups. A position needs a block in each of them."""

    def needing_block(self, live: Seq[Sequence]) -> list[Sequence]:
        """Returns the live sequences of a group that need another block before their next position can be written.

        Of k sequences that share an unsealed block, k - 1 copy it and the last one keeps it.
        """
        size = self._block_size  # in most steps most sequences have room; they take the short path
        found = [s for s in live if s.tail_sealed or (s.num_computed % size == 0 and self._is_full(s))]
        if len(live) == 1 or len(found) == len(live):  # groups share sealed blocks only
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
        """Gives a sequence one block per KV group for its next position: additional blocks, or replacements for the
        last ones, whose content must then be copied.
        """
        if self._is_full(sequence):
            for table, ref in zip(sequence.tables, fresh, strict=True):
                table.append(ref)
            return
        sequence.copy_from = tuple(table[-1] for table in sequence.tables)
        for table, ref in zip(sequence.tables, fresh, strict=True):
            table[-1] = ref
        sequence.tail_sealed = False

    def copy(self, copying: Seq[Sequence]) -> None:
        """Makes all copies of the step in one call. Their sources keep their references until `copied` is called."""
        if copying:
            sources = [ref.block for s in copying for ref in s.copy_from]
            self._runner.copy_blocks(sources, [table[-1].block for s in copying for table in s.tables])

    def copied(self, copying: Seq[Sequence]) -> None:
        """Releases the sources of the copies, because the copies are good."""
        if not copying:
            return
        self._attached.held.release_many([[ref] for sequence in copying for ref in sequence.copy_from])
        for sequence in copying:
            sequence.copy_from = ()

    def _is_full(self, sequence: Sequence) -> bool:
        return sequence.num_computed // self._block_size == len(sequence.table)
