"""The arrays of decode steps, kept from one step to the next. No torch, no I/O.

There is one row per sequence. A row of block numbers is copied again only when its table has changed
(`BlockTable.stamp`), so a step costs a few array operations and three numbers per sequence. `engine.sequence.lay_out`
does the same for chunks of any size; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from engine.sequence import Sequence, Step
from engine.step import StepInput

_START_ROWS, _START_COLUMNS = 8, 16


class DecodeRows:
    """Lays out steps of one token per sequence, over one KV group."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._stamps: list[int] = []
        self._widths: list[int] = []
        self._make(_START_ROWS, _START_COLUMNS)

    def lay_out(self, sequences: Seq[Sequence]) -> Step:
        """Returns the step that computes each sequence's next position, with logits of every row.

        Raises ValueError if a sequence has no block for it. The arrays are valid until the next call.
        """
        num, size = len(sequences), self._block_size
        self._update([sequence.table.stamp for sequence in sequences], sequences)
        width = max(self._widths)
        blocks, generations = self._blocks[:num, :width], self._generations[:num, :width]
        computed = [sequence.num_computed for sequence in sequences]
        newest = [s.output_ids[-1] if s.output_ids else s.prompt_ids[-1] for s in sequences]
        positions = np.array(computed, np.int64)
        if (positions // size >= np.array(self._widths)).any():
            raise ValueError("a sequence has no block for its next position")
        slots = self._blocks[self._rows[:num], positions // size].astype(np.int64) * size + positions % size
        batch = StepInput(
            np.array(newest, np.int64),
            positions,
            (slots,),
            self._starts[: num + 1],
            (positions + 1).astype(np.int32),
            (blocks,),
            self._rows[:num],
        )
        return Step(batch, generations)

    def _update(self, stamps: list[int], sequences: Seq[Sequence]) -> None:
        """Copies the tables of rows that are new or have changed."""
        if stamps == self._stamps:
            return
        widths = [len(sequence.table) for sequence in sequences]
        self._make_room(len(widths), max(widths))
        known = self._stamps + [-1] * (len(stamps) - len(self._stamps))
        for row, stamp in enumerate(stamps):
            if stamp != known[row]:
                blocks, generations, used = self._blocks[row], self._generations[row], widths[row]
                sequences[row].table.copy_to(blocks[:used], generations[:used])
                blocks[used:], generations[used:] = blocks[0], generations[0]  # so that all of it may be checked
        self._stamps, self._widths = stamps, widths

    def _make_room(self, num_rows: int, num_columns: int) -> None:
        rows, columns = self._blocks.shape
        if num_rows > rows or num_columns > columns:
            self._make(max(rows, 1 << (num_rows - 1).bit_length()), max(columns, 1 << (num_columns - 1).bit_length()))
            self._stamps = []

    def _make(self, num_rows: int, num_columns: int) -> None:
        self._blocks = np.zeros((num_rows, num_columns), np.int32)
        self._generations = np.zeros((num_rows, num_columns), np.uint64)
        self._rows = np.arange(num_rows, dtype=np.int64)
        self._starts = np.arange(num_rows + 1, dtype=np.int32)
