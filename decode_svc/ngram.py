"""The n-gram drafter (prompt lookup). It predicts that a text that occurred before continues as it did then.

A sequence's tokens, prompt and output, are indexed by their n-grams. If the newest n tokens occurred before, the tokens
that followed their latest earlier occurrence are the prediction. The largest such n is used. The drafter uses neither a
model nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.sequence import Sequence

LOOK_AHEAD = 32
"""Number of tokens that are predicted at a time. As long as they are right, no further look-up is needed."""
MOST_INDEXED = 4096
"""Maximum number of tokens that one look-up indexes, which takes about 1 ms per n. A longer prompt is indexed over
several steps.
"""


class NgramDrafter:
    """A drafter with an n-gram index for each running sequence. The object is used in the step thread."""

    def __init__(self, longest: int, shortest: int) -> None:
        """Creates a drafter without indexes. `longest` and `shortest` are the largest and the smallest n of the n-grams
        (vLLM: `prompt_lookup_max` and `prompt_lookup_min`).
        """
        self._sizes = range(longest, shortest - 1, -1)
        self._indexes: dict[Sequence, _Index] = {}

    def predict(self, sequence: Sequence) -> Seq[int]:
        """Returns tokens that may follow the sequence, or no tokens."""
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = _Index(sequence.prompt_ids, self._sizes)
        return index.predict(sequence.output_ids)

    def drop(self, sequence: Sequence) -> None:
        """Removes the index of a sequence."""
        self._indexes.pop(sequence, None)


class _Index:
    """The n-grams of one sequence's tokens, with the end of each n-gram's latest occurrence."""

    def __init__(self, prompt_ids: Seq[int], sizes: Seq[int]) -> None:
        self._tokens = list(prompt_ids)
        self._num_prompt = len(self._tokens)
        self._ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._indexed = 0
        """Number of leading tokens whose n-grams are in the index."""

    def predict(self, output_ids: Seq[int]) -> Seq[int]:
        tokens = self._tokens
        tokens += output_ids[len(tokens) - self._num_prompt :]
        end = min(len(tokens) - 1, self._indexed + MOST_INDEXED)  # the newest n-gram is looked up, so it is not indexed
        for size, ends in self._ends.items():
            first = max(size, self._indexed + 1)
            grams = zip(*(tokens[first - size + i : end - size + 1 + i] for i in range(size)), strict=True)
            ends.update(zip(grams, range(first, end + 1), strict=True))
        self._indexed = max(self._indexed, end)
        if end < len(tokens) - 1:
            return ()
        for size, ends in self._ends.items():
            if (at := ends.get(tuple(tokens[-size:]))) is not None:
                return self._after(at)
        return ()

    def _after(self, at: int) -> Seq[int]:
        """Returns LOOK_AHEAD tokens from `at` on. If there are fewer, the text from `at` on is assumed to repeat."""
        found = self._tokens[at : at + LOOK_AHEAD]
        return (found * -(-LOOK_AHEAD // len(found)))[:LOOK_AHEAD]
