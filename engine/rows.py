"""Builds the arrays of decode steps. The arrays are kept from step to step, so that most steps copy only the block
tables that have changed (`BlockTable.stamp`). `engine.sequence.lay_out` builds the arrays for chunks of any size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from engine.block_table import BlockTable
from engine.draft import Draft
from engine.sequence import Sequence, Step, adapters_of
from engine.step import StepInput

_START_ROWS, _START_COLUMNS = 8, 16


class DecodeRows:
    """A builder of decode steps that keeps its arrays from step to step."""

    def __init__(self, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._groups = [_GroupRows() for _ in range(num_groups)]
        self._make(_START_ROWS)

    def lay_out(self, sequences: Seq[Sequence], drafts: Seq[Draft] = ()) -> Step:
        """Returns the step that computes each sequence's next position, and the positions of its draft, with logits of
        every row. `drafts` has one entry per sequence; it is empty if there is no draft.

        Raises ValueError if a sequence has no block for one of these positions. The arrays are valid until the next
        call.
        """
        num, size = len(sequences), self._block_size
        newest = [s.output_ids[-1] if s.output_ids else s.prompt_ids[-1] for s in sequences]
        computed = np.array([sequence.num_computed for sequence in sequences], np.int64)
        counts = [1 + len(draft.token_ids) for draft in drafts]
        self._make_room(sum(counts) or num)
        if counts:
            newest = [token for first, draft in zip(newest, drafts, strict=True) for token in (first, *draft.token_ids)]
            owners, starts = (
                np.repeat(self._rows[:num], counts),
                np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            )
            positions = computed[owners] + self._rows[: len(newest)] - starts[owners]
        else:
            owners, starts, positions = self._rows[:num], self._starts[: num + 1], computed
        columns, offsets = positions // size, positions % size
        slots, tables, generations = [], [], []
        for index, group in enumerate(self._groups):
            group.update([s.table if index == 0 else s.more_tables[index - 1] for s in sequences])
            if (columns >= np.array(group.widths)[owners]).any():
                raise ValueError("a sequence has no block for its next position")
            slots.append(group.blocks[owners, columns].astype(np.int64) * size + offsets)
            width = max(group.widths)
            tables.append(group.blocks[:num, :width])
            generations.append(group.generations[:num, :width])
        batch = StepInput(
            np.array(newest, np.int64),
            positions,
            tuple(slots),
            starts,
            (computed + (counts or 1)).astype(np.int32),
            tuple(tables),
            self._rows[: len(newest)],
            adapters_of(sequences),
        )
        return Step(batch, tuple(generations))

    def _make_room(self, num_rows: int) -> None:
        if num_rows > len(self._rows):
            self._make(1 << (num_rows - 1).bit_length())

    def _make(self, num_rows: int) -> None:
        self._rows = np.arange(num_rows, dtype=np.int64)
        self._starts = np.arange(num_rows + 1, dtype=np.int32)


class _GroupRows:
    """The block tables of one KV group as rows of two arrays."""

    def __init__(self) -> None:
        self._stamps: list[int] = []
        self.widths: list[int] = []
        self._make(_START_ROWS, _START_COLUMNS)

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

    def _make_room(self, num_rows: int, num_columns: int) -> None:
        rows, columns = self.blocks.shape
        if num_rows > rows or num_columns > columns:
            self._make(max(rows, 1 << (num_rows - 1).bit_length()), max(columns, 1 << (num_columns - 1).bit_length()))
            self._stamps = []

    def _make(self, num_rows: int, num_columns: int) -> None:
        self.blocks = np.zeros((num_rows, num_columns), np.int32)
        self.generations = np.zeros((num_rows, num_columns), np.uint64)
