"""Builds the arrays of decode steps. The arrays are kept from step to step, so that most steps copy only the block
tables that have changed (`BlockTable.stamp`). `engine.sequence.lay_out` builds the arrays for chunks of any size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from operator import le, lt

import numpy as np
import numpy.typing as npt

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
        self._laid_out: _LaidOut | None = None

    def lay_out(self, sequences: Seq[Sequence], drafts: Seq[Draft] = ()) -> Step:
        """Returns the step that computes each sequence's next position, and the positions of its draft, with logits of
        every row. `drafts` has one entry per sequence; it is empty if there is no draft.

        Raises ValueError if a sequence has no block for one of these positions. The arrays are valid until the next
        call. If a call returns the same object as the previous call, it has changed only the contents of `token_ids`,
        `positions`, `slot_mappings` and `context_lens`.
        """
        num, size = len(sequences), self._block_size
        newest = [s.output_ids[-1] if s.output_ids else s.prompt_ids[-1] for s in sequences]
        done = [sequence.num_computed for sequence in sequences]
        last, self._laid_out = self._laid_out, None
        if last is not None and not drafts and self._are_known(sequences) and last.has_room(sequences, done):
            self._laid_out = last
            return last.update(newest, done)
        computed = np.array(done, np.int64)
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
            group.update(_tables(sequences, index))
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
        step = Step(batch, tuple(generations))
        if not drafts:
            self._laid_out = _LaidOut(step, sequences, columns, size)
        return step

    def _are_known(self, sequences: Seq[Sequence]) -> bool:
        """Returns whether the arrays already contain the block tables of these sequences."""
        groups = enumerate(self._groups)
        return all(group.stamps == [t.stamp for t in _tables(sequences, index)] for index, group in groups)

    def _make_room(self, num_rows: int) -> None:
        if num_rows > len(self._rows):
            self._make(1 << (num_rows - 1).bit_length())

    def _make(self, num_rows: int) -> None:
        self._rows = np.arange(num_rows, dtype=np.int64)
        self._starts = np.arange(num_rows + 1, dtype=np.int32)


class _LaidOut:
    """A step without drafts, which later steps of the same sequences update in place, as long as each sequence writes
    to the same block.
    """

    def __init__(self, step: Step, sequences: Seq[Sequence], columns: npt.NDArray[np.int64], block_size: int) -> None:
        """`columns` [B]: for each sequence, the column of the block table that the step writes to."""
        self._sequences = list(sequences)
        self._step = step
        self._starts = (columns * block_size).tolist()
        self._ends = ((columns + 1) * block_size).tolist()
        positions = step.batch.positions
        self._slots = [(slots, slots - positions) for slots in step.batch.slot_mappings]

    def has_room(self, sequences: Seq[Sequence], positions: list[int]) -> bool:
        """Returns whether these are the step's sequences, and all positions are in the blocks that it writes to."""
        is_same = self._sequences == sequences  # compares by identity
        return is_same and all(map(le, self._starts, positions)) and all(map(lt, positions, self._ends))

    def update(self, token_ids: list[int], positions: list[int]) -> Step:
        batch = self._step.batch
        batch.token_ids[:], batch.positions[:] = token_ids, positions
        batch.context_lens[:] = batch.positions
        batch.context_lens += 1
        for slots, offsets in self._slots:
            np.add(offsets, batch.positions, out=slots)
        return self._step


def _tables(sequences: Seq[Sequence], group: int) -> list[BlockTable]:
    return [s.table if group == 0 else s.more_tables[group - 1] for s in sequences]


class _GroupRows:
    """The block tables of one KV group as rows of two arrays."""

    def __init__(self) -> None:
        self.stamps: list[int] = []
        self.widths: list[int] = []
        self._make(_START_ROWS, _START_COLUMNS)

    def update(self, tables: Seq[BlockTable]) -> None:
        """Copies `tables[i]` to row i, unless the row is known to contain the table already."""
        stamps = [table.stamp for table in tables]
        if stamps == self.stamps:
            return
        widths = list(map(len, tables))
        self._make_room(len(widths), max(widths))
        known = self.stamps + [-1] * (len(stamps) - len(self.stamps))
        for row, stamp in enumerate(stamps):
            if stamp != known[row]:
                blocks, generations, used = self.blocks[row], self.generations[row], widths[row]
                tables[row].copy_to(blocks[:used], generations[:used])
                blocks[used:], generations[used:] = blocks[0], generations[0]  # so that every entry may be checked
        self.stamps, self.widths = stamps, widths

    def _make_room(self, num_rows: int, num_columns: int) -> None:
        rows, columns = self.blocks.shape
        if num_rows > rows or num_columns > columns:
            self._make(max(rows, 1 << (num_rows - 1).bit_length()), max(columns, 1 << (num_columns - 1).bit_length()))
            self.stamps = []

    def _make(self, num_rows: int, num_columns: int) -> None:
        self.blocks = np.zeros((num_rows, num_columns), np.int32)
        self.generations = np.zeros((num_rows, num_columns), np.uint64)
