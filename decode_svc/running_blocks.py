"""Manages the blocks of running sequences: applies the reader rule, seals blocks, shares them among forked beams, and
releases them.
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
"""The sequences of a step, with their groups. The sequences of a group are adjacent, in the order of `Group.live`."""


class RunningBlocks:
    """The owner of the blocks of one worker's running sequences. It is used in the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached) -> None:
        self._attached = attached
        self.writes = CopyOnWrite(runner, attached)
        self._layout = runner.layout
        self._slides = runner.layout.slides

    # --- before the step, and after it

    def stale(self, plan: Plan, step: Step, copying: Seq[Sequence]) -> set[Group]:
        """Applies the reader rule to block tables and to the sources of copies. Returns the groups with a
        stale block.
        """
        arena = self._attached.arena
        found = stale_owners(arena, (group for group, _ in plan), step)
        if copying and not arena.check_refs([ref for s in copying for ref in s.copy_from]):
            lost = [s for s in copying if not arena.check_refs(s.copy_from)]
            found |= {group for group, sequence in plan if sequence in lost}
        return found

    def seal(self, sequences: Iterable[Sequence]) -> None:
        """Seals the blocks that a step filled, and releases those that have left a window. Must be called before the
        step's tokens are sent. Only one sequence writes to a block, so no block is sealed twice. If a block with the
        same hash is already indexed, it replaces the new block.
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
        """Returns the sequences after a step of a beam search. New sequence i continues `live[parents[i]]`. The first
        child of a parent takes over the parent's blocks, and further children share them. The blocks of a parent
        without a child are released.
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
    """Returns the sequences for which a block must be copied before the step."""
    return [sequence for _, sequence in plan if sequence.copy_from]
