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
from decode_svc.copy_on_write import CopyOnWrite, source_of
from decode_svc.scheduler import Group
from engine.block_table import BlockTable
from engine.model_runner import ModelRunner
from engine.sequence import Sequence, Step
from worker.loop import stale_owners

Plan = list[tuple[Group, Sequence]]
"""The sequences whose next position one step computes. Those of a group are adjacent, in the order of its live ones."""


class RunningBlocks:
    """The block tables of running sequences, used in the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached) -> None:
        self._attached = attached
        self.writes = CopyOnWrite(runner, attached)
        self._block_size = runner.layout.block_size

    # --- before the step, and after it

    def stale(self, plan: Plan, step: Step, copying: Seq[Sequence]) -> set[Group]:
        """Applies the reader rule to tables and to the sources of copies. Returns the groups with a
        reallocated block.
        """
        arena = self._attached.arena
        found = stale_owners(arena, (group for group, _ in plan), step)
        if copying and not arena.check_refs([source_of(s) for s in copying]):
            lost = [s for s in copying if not arena.check_refs([source_of(s)])]
            found |= {group for group, sequence in plan if sequence in lost}
        return found

    def seal(self, sequences: Iterable[Sequence]) -> None:
        """Seals and publishes the blocks that a step filled. They are acknowledged before any token of the step is
        sent.

        Each was written by one sequence alone, so no block is listed twice. If equal content is already published, even
        by another sequence of this step, that block replaces it.
        """
        size = self._block_size
        filled = [s for s in sequences if s.num_computed // size > s.num_sealed]
        if not filled:
            return
        items: list[SealItem] = []
        for sequence in filled:
            sequence.extend_hashes(sequence.num_sealed + 1, size, next_hash)
            block = sequence.num_sealed
            items.append(SealItem(sequence.table[block], sequence.block_hash(block), sequence.quota_of(block)))
        for sequence, ref in zip(filled, self._attached.held.seal(items), strict=True):
            sequence.table[sequence.num_sealed] = ref
            sequence.num_sealed += 1

    def fork(self, live: Seq[Sequence], parents: Seq[int]) -> list[Sequence]:
        """Returns the sequences after a step of beam search. `parents[i]` is the index of the sequence that number i
        continues.

        The first child of a parent takes its place, and further children share its blocks. A parent without a child
        releases its blocks at once.
        """
        children: list[Sequence] = []
        taken: set[int] = set()
        for index, parent in enumerate(parents):
            sequence = live[parent]
            if parent in taken:
                self._attached.held.share(sequence.table)
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
            source = [] if sequence.copy_from is None else [sequence.copy_from]
            tables.append([*sequence.table, *source])
            forget(sequence)
        if tables:
            with suppress(Fenced):  # they were taken back already
                self._attached.held.release_many(tables)


def forget(sequence: Sequence) -> None:
    """Forgets the sequence's blocks, which the worker no longer holds or which are counted elsewhere."""
    sequence.table, sequence.copy_from = BlockTable(), None


def copying(plan: Plan) -> list[Sequence]:
    """Returns the sequences that copy a block before the step."""
    return [sequence for _, sequence in plan if sequence.copy_from is not None]
