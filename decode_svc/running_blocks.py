"""Manages the blocks of running sequences: applies the reader rule, seals blocks, shares them among forked beams, and
releases them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress

from block_store.errors import Fenced, Stale
from block_store.holder.attach import Attached
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import next_hash
from decode_svc.copy_on_write import CopyOnWrite
from decode_svc.scheduler import Group
from engine.model_runner import ModelRunner
from engine.sequence import Sequence, Step
from worker.loop import ReaderRule
from worker.sealing import seal_items

logger = logging.getLogger("decode")
SEAL_S = 0.1
"""Minimum time in seconds between two seals of running sequences' full blocks."""
Plan = list[tuple[Group, Sequence]]
"""The sequences of a step, with their groups. The sequences of a group are adjacent, in the order of `Group.live`."""


class RunningBlocks:
    """The owner of the blocks of one worker's running sequences. It is used in the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached) -> None:
        self._clock = time.monotonic
        self._sealed_at = float("-inf")
        self._attached = attached
        self._rule = ReaderRule(attached.arena)
        self.writes = CopyOnWrite(runner, attached)
        self._layout = runner.layout
        self._slides = runner.layout.slides

    # --- before the step, and after it

    def stale(self, plan: Plan, step: Step, copying: Seq[Sequence]) -> set[Group]:
        """Applies the reader rule to block tables and to the sources of copies. Returns the groups with a
        stale block.
        """
        arena = self._attached.arena
        found = self._rule.stale_owners((group for group, _ in plan), step)
        if copying and not arena.check_refs([ref for s in copying for ref in s.copy_from]):
            lost = [s for s in copying if not arena.check_refs(s.copy_from)]
            found |= {group for group, sequence in plan if sequence in lost}
        return found

    def seal(self, plan: Plan) -> None:
        """Seals the blocks that steps have filled, and releases the blocks that have left a window. Must be called
        after each step, before the step's tokens are sent.

        A call to the ledger takes almost as long for many blocks as for one, so a call is made only every SEAL_S
        seconds. With a beam search, whose beams share blocks, or with windows, blocks are sealed in the step that fills
        them.
        """
        size = self._layout.block_size
        filled = [sequence for _, sequence in plan if sequence.num_computed // size > sequence.num_sealed]
        if not filled:
            return
        now = self._clock()
        may_wait = not self._slides and all(group.search is None for group, _ in plan)
        if may_wait and now - self._sealed_at < SEAL_S:
            return
        self._sealed_at = now
        self._seal(filled)
        if self._slides:
            self._attached.held.release_many([sequence.drop_unneeded(self._layout) for sequence in filled])

    def _seal(self, filled: Seq[Sequence]) -> None:
        """Seals the full blocks of sequences. Only one sequence writes to a block, so no block is sealed twice. If a
        block with the same hash is already indexed, it replaces the new block.
        """
        size = self._layout.block_size
        places: list[tuple[Sequence, int]] = []
        items: list[SealItem] = []
        for sequence in filled:
            num_full = sequence.num_full_blocks(size)
            sequence.extend_hashes(num_full, size, next_hash)
            for block in range(sequence.num_sealed, num_full):
                places.append((sequence, block))
                items += seal_items(sequence, block)
        final = iter(self._attached.held.seal(items))
        for sequence, block in places:
            for table in sequence.tables:
                table[block] = next(final)
            sequence.num_sealed = block + 1

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
        """Releases all blocks of these sequences in one call. Full blocks are sealed first, so that they can be found
        by their hashes.
        """
        leaving = [sequence for sequence in sequences if sequence.table]
        if not leaving:
            return
        with suppress(Fenced):  # the blocks have already been taken back
            self._seal_leaving(leaving)
            tables = [[*sequence.live_refs(), *sequence.copy_from] for sequence in leaving]
            self._attached.held.release_many(tables)
        for sequence in leaving:
            sequence.forget_blocks()

    def _seal_leaving(self, leaving: Seq[Sequence]) -> None:
        """Seals the full blocks of sequences, except those of a sequence with a stale block."""
        size, check = self._layout.block_size, self._attached.arena.check_refs
        filled = [s for s in leaving if s.num_full_blocks(size) > s.num_sealed and check(s.live_refs())]
        if not filled:
            return
        try:
            self._seal(filled)
        except Stale as error:
            logger.warning("the full blocks of %d sequences are not published: %s", len(filled), error)


def copying(plan: Plan) -> list[Sequence]:
    """Returns the sequences for which a block must be copied before the step."""
    return [sequence for _, sequence in plan if sequence.copy_from]
