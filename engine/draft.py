"""A draft consists of tokens that are predicted to follow a sequence, and that one step verifies. This module does not
use torch.

The step computes the sequence's next position and the positions of the draft. Row i draws a token after i tokens of the
draft, exactly as a separate step would, with its own position, penalties and grammar state. The drawn token is accepted
if the i tokens of the draft before it were also drawn. The output is therefore the same as that of plain decoding,
whatever the draft was (docs/speculation.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from engine.grammar_state import Mask
from engine.sequence import Sequence

MAX_MASKS_CPU_S = 0.002
"""Limit on the CPU time, in seconds, for the masks of one draft. The draft ends when its masks have taken longer."""


class Ahead(NamedTuple):
    """The tokens of a draft that precede a row, and the grammar's mask after these tokens, or None for free text."""

    token_ids: tuple[int, ...]
    mask: Mask | None


@dataclass(frozen=True, slots=True)
class Draft:
    """The tokens that are predicted to follow a sequence. The draft is empty if there is no prediction."""

    token_ids: tuple[int, ...] = ()
    masks: Seq[Mask] = ()
    """The grammar's mask after each of the tokens; empty for free text."""

    @classmethod
    def of(cls, sequence: Sequence, token_ids: tuple[int, ...]) -> Draft:
        """Returns a draft of the leading tokens that the sequence's grammar allows. The draft is shorter if a mask
        cannot be computed, or if the masks take longer than MAX_MASKS_CPU_S. Raises GrammarError if the grammar has no
        mask for the sequence's own next token (`GrammarState.mask`).
        """
        if sequence.grammar is None or not token_ids:
            return cls(token_ids)
        masks = sequence.grammar.masks_after(sequence.output_ids, token_ids, MAX_MASKS_CPU_S)
        return cls(token_ids[: len(masks)], masks)

    @property
    def num_rows(self) -> int:
        """The number of the sequence's rows in a step that verifies the draft."""
        return 1 + len(self.token_ids)

    @property
    def rows(self) -> list[Ahead | None]:
        """For each row of the sequence, the tokens of the draft that precede it. The entry of the first row, which
        draws the sequence's next token, is None.
        """
        masks = self.masks or (None,) * len(self.token_ids)
        return [None, *(Ahead(self.token_ids[: i + 1], mask) for i, mask in enumerate(masks))]


NO_DRAFT = Draft()
