"""Builds the arrays of decode steps. The arrays are kept from step to step, so that most steps copy only the block
tables that have changed (`BlockTable.stamp`). `engine.sequence.lay_out` builds the arrays for chunks of any size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import is_, le, lt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.block_table import BlockTable
from engine.draft import Draft
from engine.sequence import Sequence, Step, adapters_of
from engine.step import StepInput

if TYPE_CHECKING:
    from engine.lora import LoraAdapter

_START_ROWS, _START_COLUMNS = 8, 16
_COLUMNS = 8
"""Block tables have a multiple of this many columns, so that their width seldom changes."""
_MOST_KEPT = 32
"""Maximum number of steps that are kept."""


class DecodeRows:
    """A builder of decode steps that keeps its arrays from step to step."""

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._groups = [_GroupRows() for _ in range(num_groups)]
        self._kept: dict[tuple[int, ...], _KeptStep] = {}
        """The latest steps, by the numbers of rows of their sequences, or zeros if there are no drafts."""
        self._sequences: list[Sequence] = []
        self._adapters: tuple[LoraAdapter | None, ...] = ()
        """The sequences of the last step, and their adapters."""

    def lay_out(self, sequences: Seq[Sequence], drafts: Seq[Draft] = ()) -> Step:
        """Returns the step that computes each sequence's next position, and the positions of its draft, with logits of
        every row. `drafts` has one entry per sequence; it is empty if there is no draft.

        Raises ValueError if a sequence has no block for one of these positions. The arrays are valid until the next
        call. If a call returns the same object as an earlier call, it has changed only the contents of `token_ids`,
        `positions`, `slot_mappings` and `context_lens`.
        """
        tokens = [s.output_ids[-1] if s.output_ids else s.prompt_ids[-1] for s in sequences]
        done = [sequence.num_computed for sequence in sequences]
        counts: tuple[int, ...] = ()
        if drafts:
            tokens = [token for first, draft in zip(tokens, drafts, strict=True) for token in (first, *draft.token_ids)]
            counts = tuple([draft.num_rows for draft in drafts])
        if self._sequences != sequences:  # compares by identity
            if self._adapters:
                self._kept.clear()  # these steps refer to adapters, which may be unloaded
            self._sequences, self._adapters = list(sequences), adapters_of(sequences)
        for index, group in enumerate(self._groups):
            group.update(_tables(sequences, index))
        kept = self._kept.get(key := counts or (0,) * len(sequences))
        if kept is None or not kept.has_tables():
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            kept = self._kept[key] = _KeptStep(counts, len(sequences), self._groups, self._block_size)
        return kept.update(tokens, done, self._adapters)


class _KeptStep:
    """A step that later steps with the same numbers of rows update in place."""

    def __init__(self, counts: tuple[int, ...], num: int, groups: Seq[_GroupRows], block_size: int) -> None:
        """`counts` are the numbers of rows of the `num` sequences; empty: one each."""
        self._groups, self._block_size = groups, block_size
        self._has_drafts, self._counts = bool(counts), counts or (1,) * num
        starts = np.concatenate([[0], np.cumsum(self._counts)]).astype(np.int32)
        num_rows = int(starts[-1])
        self._owners = np.repeat(np.arange(num), self._counts)
        self._within = np.arange(num_rows) - starts[self._owners]
        self._lasts = starts[1:] - 1
        self._columns, self._firsts_of_blocks = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        batch = StepInput(
            np.zeros(num_rows, np.int64),
            np.zeros(num_rows, np.int64),
            tuple(np.zeros(num_rows, np.int64) for _ in groups),
            starts,
            np.zeros(num, np.int32),
            tuple(group.block_table for group in groups),
            np.arange(num_rows),
        )
        self._step = Step(batch, tuple(group.generation_table for group in groups))
        self._starts: list[int] = []
        self._ends: list[int] = []
        """The positions that the sequences may have if all rows write to the same blocks as in the last step. Both are
        empty before the first step, and if there are drafts.
        """
        self._offsets: list[npt.NDArray[np.int64]] = []
        """For each KV group, the slots less the positions."""

    def has_tables(self) -> bool:
        """Returns whether the block tables are still in the arrays of this step."""
        return all(map(is_, self._step.batch.block_tables, [group.block_table for group in self._groups]))

    def update(self, token_ids: list[int], done: list[int], adapters: tuple[LoraAdapter | None, ...]) -> Step:
        batch = self._step.batch
        batch.adapters = adapters
        generations = [group.generation_table for group in self._groups]
        if not all(map(is_, generations, self._step.generations)):  # a table has changed
            self._step, self._starts = Step(batch, tuple(generations)), []
        batch.token_ids[:] = token_ids
        if self._starts and all(map(le, self._starts, done)) and all(map(lt, done, self._ends)):
            batch.positions[:] = done
            for slots, offsets in zip(batch.slot_mappings, self._offsets, strict=True):
                np.add(offsets, batch.positions, out=slots)
        else:
            self._find_slots(batch, done)
        batch.context_lens[:] = batch.positions[self._lasts] if self._has_drafts else batch.positions
        batch.context_lens += 1
        return self._step

    def _find_slots(self, batch: StepInput, done: list[int]) -> None:
        """Sets positions and slots from the block tables. Raises ValueError like `DecodeRows.lay_out`."""
        size, columns, block_starts = self._block_size, self._columns, self._firsts_of_blocks
        np.add(np.array(done)[self._owners], self._within, out=batch.positions)
        np.floor_divide(batch.positions, size, out=columns)
        np.multiply(columns, size, out=block_starts)
        most = [(first + count - 1) // size for first, count in zip(done, self._counts, strict=True)]
        for group, slots in zip(self._groups, batch.slot_mappings, strict=True):
            if not all(map(lt, most, group.widths)):
                self._starts = []
                raise ValueError("a sequence has no block for its next position")
            slots[:] = group.block_table[self._owners, columns]
            slots *= size
            slots -= block_starts
        if not self._has_drafts:
            self._starts = block_starts.tolist()
            self._ends = [start + size for start in self._starts]
            self._offsets = [slots.copy() for slots in batch.slot_mappings]
        for slots in batch.slot_mappings:
            slots += batch.positions


def _tables(sequences: Seq[Sequence], group: int) -> list[BlockTable]:
    return [s.table if group == 0 else s.more_tables[group - 1] for s in sequences]


class _GroupRows:
    """The block tables of one KV group as rows of two arrays."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self._stamps: list[int] = []
        self._make(_START_ROWS, _START_COLUMNS)
        self.block_table = self.blocks[:0]
        """The blocks of the tables, [num, columns]. The object remains the same until its shape changes, or the memory
        behind it.
        """
        self.generation_table = self.generations[:0]
        """The generations of the blocks. The object remains the same until a table changes."""

    def update(self, tables: Seq[BlockTable]) -> None:
        """Copies `tables[i]` to row i, unless the row is known to contain the table already."""
        stamps = [table.stamp for table in tables]
        if stamps == self._stamps:
            return
        widths = list(map(len, tables))
        self._make_room(len(widths), max(widths))
        known = self._stamps + [-1] * (len(stamps) - len(self._stamps))
        for row, stamp in enumerate(stamps):
            if stamp != known[row]:
                blocks, generations, used = self.blocks[row], self.generations[row], widths[row]
                tables[row].copy_to(blocks[:used], generations[:used])
                blocks[used:], generations[used:] = blocks[0], generations[0]  # so that every entry may be checked
        self._stamps, self.widths = stamps, widths
        shape = (len(stamps), -(-max(widths) // _COLUMNS) * _COLUMNS)
        if self.block_table.shape != shape or self.block_table.base is not self.blocks:
            self.block_table = self.blocks[: shape[0], : shape[1]]
        self.generation_table = self.generations[: shape[0], : shape[1]]

    def _make_room(self, num_rows: int, num_columns: int) -> None:
        rows, columns = self.blocks.shape
        if num_rows > rows or num_columns > columns:
            self._make(max(rows, 1 << (num_rows - 1).bit_length()), max(columns, 1 << (num_columns - 1).bit_length()))
            self._stamps = []

    def _make(self, num_rows: int, num_columns: int) -> None:
        self.blocks = np.zeros((num_rows, num_columns), np.int32)
        self.generations = np.zeros((num_rows, num_columns), np.uint64)
