"""The blocks of running sequences: the reader rule, sealing, forks of a beam search, release.

`copy_on_write` has the blocks to write into. Independent of what runs, waits or is preempted: blocks are brought here.
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
"""Whose next position one step computes; the sequences of a group stand together, in the order of its live ones."""


class RunningBlocks:
    """Block tables of running sequences. In the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached) -> None:
        self._attached = attached
        self.writes = CopyOnWrite(runner, attached)
        self._block_size = runner.layout.block_size

    # --- before the step, and after it

    def stale(self, plan: Plan, step: Step, copying: Seq[Sequence]) -> set[Group]:
        """The reader rule, for tables and for the sources of copies: groups that have a block which was reallocated."""
        arena = self._attached.arena
        found = stale_owners(arena, (group for group, _ in plan), step)
        if copying and not arena.check_refs([source_of(s) for s in copying]):
            lost = [s for s in copying if not arena.check_refs([source_of(s)])]
            found |= {group for group, sequence in plan if sequence in lost}
        return found

    def seal(self, sequences: Iterable[Sequence]) -> None:
        """Seal and publish the blocks that a step filled; acknowledged before any token of the step leaves.

        Each was written by one sequence alone, so no block is listed twice. Where equal content is published already,
        even by another sequence of this step, that block replaces it.
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
        """The sequences after a step of beam search; `parents[i]` is the index of the old one that number i continues.

        The first child of a parent goes on in its place, further ones share its blocks; a parent without a child gives
        its blocks up at once.
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
        """Give up all blocks of these sequences, in one call."""
        tables: list[list[BlockRef]] = []
        for sequence in sequences:
            source = [] if sequence.copy_from is None else [sequence.copy_from]
            tables.append([*sequence.table, *source])
            forget(sequence)
        if tables:
            with suppress(Fenced):  # they were taken back already
                self._attached.held.release_many(tables)


def forget(sequence: Sequence) -> None:
    """Its blocks are not ours any more, or counted elsewhere now."""
    sequence.table, sequence.copy_from = BlockTable(), None


def copying(plan: Plan) -> list[Sequence]:
    """Who copies a block before the step."""
    return [sequence for _, sequence in plan if sequence.copy_from is not None]
