"""The sampler of decode's steps, in which mostly the same sequences follow each other."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from engine.draft import Ahead, Draft
from engine.sampler import Columns, Sampled, SampleRow, adjust
from engine.sequence import Sequence
from kernels.sampling import RepeatedSample

_MOST_KEPT = 16
"""Maximum number of columns of drafts that are kept."""


class Sampler:
    """A sampler for the same sequences over many steps. It prepares their parameters only when the batch changes."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._columns = Columns(())
        self._repeated: dict[tuple[int, ...], Columns] = {}
        """The columns of recent drafts, by the numbers of their rows."""

    def prepare(self, sequences: Seq[Sequence], drafts: Seq[Draft] = ()) -> RepeatedSample | None:
        """Returns the next draw for these sequences, so that a pass can run it, or None if it needs changed logits. In
        both cases, call `draw` after the pass.
        """
        columns = self._columns_of(sequences, drafts)
        return None if columns.adjusted else columns.sample.at(_positions(sequences, drafts))

    def draw(self, logits: torch.Tensor, sequences: Seq[Sequence], drafts: Seq[Draft] = ()) -> list[Sampled]:
        """Draws the next token of each row of fp32 logits [R, vocab], unless a pass has drawn it (`prepare`). The
        logits are not changed. Each sequence has one row, and one more for each token of its draft. `drafts` has one
        entry per sequence; it is empty if there is no draft.
        """
        columns = self._columns_of(sequences, drafts)
        if not columns.sample.has_drawn(logits):
            columns.sample.at(_positions(sequences, drafts))
        if not columns.adjusted and not columns.asked:
            return [Sampled(token_id, None) for token_id in columns.sample.draw(logits)]
        with torch.inference_mode():
            owners: list[tuple[Sequence, Ahead | None]] = [(s, None) for s in sequences]
            if drafts:
                owners = [(s, ahead) for s, draft in zip(sequences, drafts, strict=True) for ahead in draft.rows]
            ids = columns.sample.draw(adjust(logits, [(i, SampleRow.of(*owners[i])) for i in columns.adjusted]))
            return list(map(Sampled, ids, columns.logprobs(logits, ids)))

    def _columns_of(self, sequences: Seq[Sequence], drafts: Seq[Draft]) -> Columns:
        if sequences != self._sequences:  # compares by identity
            self._sequences, self._columns = list(sequences), Columns([SampleRow.of(s) for s in sequences])
            self._repeated = {}
        if not drafts:
            return self._columns
        num_rows = tuple([draft.num_rows for draft in drafts])
        if (found := self._repeated.get(num_rows)) is None:
            if len(self._repeated) >= _MOST_KEPT:
                self._repeated = {}
            found = self._repeated[num_rows] = self._columns.repeated(num_rows)
        return found


def _positions(sequences: Seq[Sequence], drafts: Seq[Draft]) -> list[int]:
    """Returns the position of each row's token among the outputs of its sequence."""
    if not drafts:
        return [len(sequence.output_ids) for sequence in sequences]
    pairs = zip(sequences, drafts, strict=True)
    return [len(sequence.output_ids) + i for sequence, draft in pairs for i in range(draft.num_rows)]
