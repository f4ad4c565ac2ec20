"""The blocks of running sequences: one to write into, copy-on-write, the reader rule, sealing, giving up.

Knows nothing of what runs, waits or is preempted: blocks are brought to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress

from block_store.attach import Attached
from block_store.codec import SealItem
from block_store.errors import Fenced
from block_store.hashing import next_hash
from common.types import BlockRef
from decode_svc.scheduler import Group
from engine.runner import ModelRunner
from engine.sequence import BlockTable, Chunk, Sequence, Step

Plan = list[tuple[Group, Chunk]]
"""What one step computes; the chunks of a group stand together."""


class RunningBlocks:
    """Block tables of running sequences. In the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached) -> None:
        self._runner = runner
        self._attached = attached
        self._block_size = runner.layout.block_size

    # --- before the step

    def needy(self, group: Group) -> list[Sequence]:
        """The group's sequences that need a block more before their next position can be written."""
        size = self._block_size
        return [s for s in group.live if s.tail_sealed or s.num_computed // size >= len(s.table)]

    def give(self, sequence: Sequence, fresh: BlockRef) -> None:
        """A block for the next position, in place of one that may not be written (copied before the step), or new."""
        block = sequence.num_computed // self._block_size
        if block == len(sequence.table):
            sequence.table.append(fresh)
            return
        sequence.copy_from = sequence.table[block]
        sequence.table[block] = fresh
        sequence.tail_sealed = False

    def stale(self, plan: Plan, step: Step) -> set[Group]:
        """The reader rule, for tables and for the sources of copies: groups whose blocks live another life now."""
        arena = self._attached.arena
        found: set[Group] = set()
        if not arena.check(step.block_table, step.generations):
            rows = zip(step.block_table, step.generations, strict=True)
            found |= {group for (group, _), row in zip(plan, rows, strict=True) if not arena.check(*row)}
        for group, chunk in plan:
            source = chunk.sequence.copy_from
            if source is not None and int(arena.generations[source.block]) != source.generation:
                found.add(group)
        return found

    def copy(self, plan: Plan) -> list[Sequence]:
        """All copies of the step, in one call; returns who copied."""
        copying = [chunk.sequence for _, chunk in plan if chunk.sequence.copy_from is not None]
        if copying:
            self._runner.copy_blocks([_source(s).block for s in copying], [s.table[-1].block for s in copying])
        return copying

    # --- after it

    def copied(self, copying: Seq[Sequence]) -> None:
        """The copies hold: give their sources up."""
        for sequence in copying:
            self._attached.held.release([_source(sequence)])
            sequence.copy_from = None

    def seal(self, sequences: Iterable[Sequence]) -> None:
        """Seal and publish the blocks that a step filled; acknowledged before any token of the step leaves."""
        filled = [s for s in sequences if s.num_full_blocks(self._block_size) > s.num_sealed]
        if not filled:
            return
        items: list[SealItem] = []
        for sequence in filled:
            sequence.extend_hashes(sequence.num_sealed + 1, self._block_size, next_hash)
            block = sequence.num_sealed
            items.append(SealItem(sequence.table[block], sequence.block_hash(block)))
        for sequence, ref in zip(filled, self._attached.held.seal(items), strict=True):
            sequence.table[sequence.num_sealed] = ref
            sequence.num_sealed += 1

    # --- leaving

    def release(self, sequence: Sequence) -> None:
        """Give up all its blocks."""
        source = [] if sequence.copy_from is None else [sequence.copy_from]
        refs = [*sequence.table, *source]
        forget(sequence)
        with suppress(Fenced):  # they were taken back already
            self._attached.held.release(refs)


def forget(sequence: Sequence) -> None:
    """Its blocks are not ours any more, or counted elsewhere now."""
    sequence.table, sequence.copy_from = BlockTable(), None


def _source(sequence: Sequence) -> BlockRef:
    assert sequence.copy_from is not None
    return sequence.copy_from
