"""The n-gram drafter (prompt lookup). It predicts that a text that occurred before continues as it did then.

If the newest n tokens of a sequence occurred before, in the prompt or the output, the tokens that followed their latest
earlier occurrence are the prediction. The largest such n is used. The drafter uses no model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from engine.sequence import Sequence
from kernels.ngram import TYPECODE, latest_ngram

LOOK_AHEAD = 128
"""Maximum number of tokens that are predicted at a time. As long as they are right, no further look-up is needed."""
LEAST_AHEAD = 32
"""A text of fewer tokens than this is assumed to repeat."""


class NgramDrafter:
    """A drafter with a copy of each running sequence's tokens. The object is used in the step thread."""

    def __init__(self, longest: int, shortest: int) -> None:
        """Creates a drafter. `longest` and `shortest` are the largest and the smallest n of the n-grams (vLLM:
        `prompt_lookup_max` and `prompt_lookup_min`).
        """
        self._longest, self._shortest = longest, shortest
        self._tokens: dict[Sequence, array[int]] = {}

    def predict(self, sequence: Sequence) -> Seq[int]:
        """Returns tokens that may follow the sequence, or no tokens."""
        if (tokens := self._tokens.get(sequence)) is None:
            tokens = self._tokens[sequence] = array(TYPECODE, sequence.prompt_ids)
        tokens.extend(sequence.output_ids[len(tokens) - len(sequence.prompt_ids) :])
        if not (at := latest_ngram(tokens, self._longest, self._shortest)):
            return ()
        found = tokens[at : at + LOOK_AHEAD].tolist()
        return found if len(found) >= LEAST_AHEAD else (found * -(-LEAST_AHEAD // len(found)))[:LEAST_AHEAD]

    def drop(self, sequence: Sequence) -> None:
        """Drops the copy of a sequence's tokens."""
        self._tokens.pop(sequence, None)
