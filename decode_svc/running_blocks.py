"""The blocks of running sequences: reader rule, sealing, forks of a beam search, release.

`copy_on_write` provides the blocks to write into. The scheduler decides which sequences run, wait or are preempted.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress

from block_store.errors import Fenced
from block_store.holder.attach import Attached
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import next_hash
from common.types import BlockRef
from decode_svc.copy_on_write import CopyOnWrite
from decode_svc.scheduler import Group
from engine.model_runner import ModelRunner
from engine.sequence import Sequence, Step
from worker.loop import stale_owners
from worker.sealing import seal_items

Plan = list[tuple[Group, Sequence]]
"""The sequences whose next position a step computes. The sequences of a group are adjacent, in the order of
`Group.live`.
"""


class RunningBlocks:
    """The block tables of running sequences, used in the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached) -> None:
        self._attached = attached
        self.writes = CopyOnWrite(runner, attached)
        self._layout = runner.layout
        self._slides = runner.layout.slides

    # --- before the step, and after it

    def stale(self, plan: Plan, step: Step, copying: Seq[Sequence]) -> set[Group]:
        """Applies the reader rule to tables and to the sources of copies. Returns the groups with a
        reallocated block.
        """
        arena = self._attached.arena
        found = stale_owners(arena, (group for group, _ in plan), step)
        if copying and not arena.check_refs([ref for s in copying for ref in s.copy_from]):
            lost = [s for s in copying if not arena.check_refs(s.copy_from)]
            found |= {group for group, sequence in plan if sequence in lost}
        return found

    def seal(self, sequences: Iterable[Sequence]) -> None:
        """Seals and publishes the blocks that a step filled. The ledger acknowledges them before any token of the step
        is sent.

        Each block was written by one sequence alone, so no block is listed twice. If a block with equal content is
        already published, even by another sequence of this step, the published block replaces the new one. Blocks that
        have slid out of a window are released.
        """
        size = self._layout.block_size
        filled = [s for s in sequences if s.num_computed // size > s.num_sealed]
        if not filled:
            return
        items: list[SealItem] = []
        for sequence in filled:
            sequence.extend_hashes(sequence.num_sealed + 1, size, next_hash)
            items += seal_items(sequence, sequence.num_sealed)
        final = iter(self._attached.held.seal(items))
        for sequence in filled:
            for table in sequence.tables:
                table[sequence.num_sealed] = next(final)
            sequence.num_sealed += 1
        if self._slides:
            self._attached.held.release_many([sequence.drop_unneeded(self._layout) for sequence in filled])

    def fork(self, live: Seq[Sequence], parents: Seq[int]) -> list[Sequence]:
        """Returns the sequences after a step of beam search. `parents[i]` is the index of the sequence that new
        sequence i continues.

        The first child of a parent takes the parent's place, and further children share its blocks. A parent without a
        child releases its blocks at once.
        """
        children: list[Sequence] = []
        taken: set[int] = set()
        for index, parent in enumerate(parents):
            sequence = live[parent]
            if parent in taken:
                self._attached.held.share(sequence.live_refs())
                sequence = sequence.fork(index)
            taken.add(parent)
            children.append(sequence)
        for index, sequence in enumerate(children):
            sequence.sample_index = index
        self.release([sequence for index, sequence in enumerate(live) if index not in taken])
        return children

    # --- leaving

    def release(self, sequences: Iterable[Sequence]) -> None:
        """Releases all blocks of these sequences in one call."""
        tables: list[list[BlockRef]] = []
        for sequence in sequences:
            tables.append([*sequence.live_refs(), *sequence.copy_from])
            sequence.forget_blocks()
        if tables:
            with suppress(Fenced):  # the blocks have already been taken back
                self._attached.held.release_many(tables)


def copying(plan: Plan) -> list[Sequence]:
    """Returns the sequences that copy a block before the step."""
    return [sequence for _, sequence in plan if sequence.copy_from]
