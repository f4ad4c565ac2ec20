"""The blocks of running sequences: one to write into, copy-on-write, the reader rule, sealing, forks, giving up.

A sequence writes in place only into a block that is not sealed and that no other one uses; else it gets a copy. Knows
nothing of what runs, waits or is preempted: blocks are brought to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress

from block_store.errors import Fenced
from block_store.holder.attach import Attached
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import next_hash
from common.types import BlockRef
from decode_svc.scheduler import Group
from engine.block_table import BlockTable
from engine.runner import ModelRunner
from engine.sequence import Sequence, Step
from worker.loop import stale_owners

Plan = list[tuple[Group, Sequence]]
"""Whose next position one step computes; the sequences of a group stand together, in the order of its live ones."""


class RunningBlocks:
    """Block tables of running sequences. In the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached) -> None:
        self._runner = runner
        self._attached = attached
        self._block_size = runner.layout.block_size

    # --- before the step

    def needy(self, group: Group) -> list[Sequence]:
        """The group's sequences that need a block more before their next position can be written.

        Of k that share a block not sealed, k - 1 copy it and the last one keeps it.
        """
        size, live = self._block_size, group.live  # in a step most have room, and no more is asked of these
        found = [s for s in live if s.tail_sealed or (s.num_computed % size == 0 and self._is_full(s))]
        if len(live) == 1 or len(found) == len(live):  # groups share sealed blocks only
            return found
        leaving = Counter(s.copy_from for s in live if s.copy_from is not None)  # of a step that did not run
        needy: list[Sequence] = []
        for sequence in live:
            if sequence in found:
                needy.append(sequence)
            elif self._attached.held.count(tail := sequence.table[-1]) - leaving[tail] > 1:
                leaving[tail] += 1
                needy.append(sequence)
        return needy

    def _is_full(self, sequence: Sequence) -> bool:
        return sequence.num_computed // self._block_size == len(sequence.table)

    def give(self, sequence: Sequence, fresh: BlockRef) -> None:
        """A block for the next position: a new one, or one in place of the last, whose content is then to be copied."""
        if self._is_full(sequence):
            sequence.table.append(fresh)
            return
        sequence.copy_from = sequence.table[-1]
        sequence.table[-1] = fresh
        sequence.tail_sealed = False

    def copy(self, copying: Seq[Sequence]) -> None:
        """All copies of the step, in one call. Their sources stay ours until `copied`."""
        if copying:
            self._runner.copy_blocks([_source(s).block for s in copying], [s.table[-1].block for s in copying])

    def stale(self, plan: Plan, step: Step, copying: Seq[Sequence]) -> set[Group]:
        """The reader rule, for tables and for the sources of copies: groups whose blocks live another life now."""
        arena = self._attached.arena
        found = stale_owners(arena, (group for group, _ in plan), step)
        if copying and not arena.check_refs([_source(s) for s in copying]):
            lost = [s for s in copying if not arena.check_refs([_source(s)])]
            found |= {group for group, sequence in plan if sequence in lost}
        return found

    # --- after it

    def copied(self, copying: Seq[Sequence]) -> None:
        """The copies hold: give their sources up."""
        if not copying:
            return
        self._attached.held.release_many([[_source(sequence)] for sequence in copying])
        for sequence in copying:
            sequence.copy_from = None

    def seal(self, sequences: Iterable[Sequence]) -> None:
        """Seal and publish the blocks that a step filled; acknowledged before any token of the step leaves.

        Each was written by one sequence alone, so none stands here twice. Where equal content is published already,
        by another sequence of the same step too, that block takes its place.
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

        The first child of a parent goes on in its place, further ones share its blocks; who has no child gives its
        blocks up at once.
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


def _source(sequence: Sequence) -> BlockRef:
    assert sequence.copy_from is not None
    return sequence.copy_from
