"""The n-gram drafter (prompt lookup). It predicts that a text that occurred before continues as it did then.

A sequence's tokens, prompt and output, are indexed by their n-grams. If the newest n tokens occurred before, the tokens
that followed their latest earlier occurrence are the prediction. The largest such n is used, among the latest
occurrences of the smallest. The drafter uses neither a model nor torch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.sequence import Sequence

LOOK_AHEAD = 128
"""Maximum number of tokens that are predicted at a time. As long as they are right, no further look-up is needed."""
LEAST_AHEAD = 32
"""A text of fewer tokens than this is assumed to repeat."""
MOST_INDEXED = 4096
"""Maximum number of tokens that one look-up indexes, which takes about 1 ms. A longer prompt is indexed over several
steps.
"""
TOKEN_BITS = 24
MOST_COMPARED = 64
"""Number of the latest occurrences of the shortest n-gram among which the longest n-gram is looked for."""


class NgramDrafter:
    """A drafter with an n-gram index for each running sequence. The object is used in the step thread."""

    def __init__(self, longest: int, shortest: int) -> None:
        """Creates a drafter without indexes. `longest` and `shortest` are the largest and the smallest n of the n-grams
        (vLLM: `prompt_lookup_max` and `prompt_lookup_min`).
        """
        self._lengths = longest, shortest
        self._indexes: dict[Sequence, _Index] = {}

    def predict(self, sequence: Sequence) -> Seq[int] | None:
        """Returns tokens that may follow the sequence, or no tokens; None while its prompt is being indexed."""
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = _Index(sequence.prompt_ids, *self._lengths)
        return index.predict(sequence.output_ids)

    def drop(self, sequence: Sequence) -> None:
        """Removes the index of a sequence."""
        self._indexes.pop(sequence, None)


class _Index:
    """The occurrences of one sequence's n-grams of the shortest length. Longer n-grams are found among these. An n-gram
    is stored as one integer, and each occurrence with the one before it, so that the garbage collector has no more
    objects to visit.
    """

    def __init__(self, prompt_ids: Seq[int], longest: int, shortest: int) -> None:
        self._tokens = list(prompt_ids)
        self._num_prompt = len(self._tokens)
        self._longest, self._shortest = longest, shortest
        self._kept = (1 << TOKEN_BITS * (shortest - 1)) - 1
        self._gram = 0
        """The n-gram that ends with the latest indexed token."""
        self._latest: dict[int, int] = {}
        """The end of the latest occurrence of each n-gram."""
        self._earlier: list[int] = []
        """For each indexed token, the end of the latest earlier occurrence of the n-gram that ends with it, or 0."""

    def predict(self, output_ids: Seq[int]) -> Seq[int] | None:
        tokens, latest, earlier = self._tokens, self._latest, self._earlier
        tokens += output_ids[len(tokens) - self._num_prompt :]
        gram, kept = self._gram, self._kept
        for token in tokens[len(earlier) : min(len(tokens) - 1, len(earlier) + MOST_INDEXED)]:
            gram = (gram & kept) << TOKEN_BITS | token
            earlier.append(latest.get(gram, 0))
            latest[gram] = len(earlier)
        self._gram = gram
        if len(earlier) < len(tokens) - 1:  # the newest n-gram is looked up, so it is not indexed
            return None
        at, best, most = latest.get((gram & kept) << TOKEN_BITS | tokens[-1], 0), 0, self._shortest - 1
        for _ in range(MOST_COMPARED):
            if not at or most == self._longest:
                break
            if (length := self._same(at)) > most:
                best, most = at, length
            at = earlier[at - 1]
        return self._after(best) if best else ()

    def _same(self, at: int) -> int:
        """Returns how many of the tokens before `at` equal the newest tokens, at most `self._longest`."""
        tokens, length = self._tokens, 0
        while length < min(self._longest, at) and tokens[at - length - 1] == tokens[-length - 1]:
            length += 1
        return length

    def _after(self, at: int) -> Seq[int]:
        """Returns the tokens from `at` on, LEAST_AHEAD to LOOK_AHEAD tokens."""
        found = self._tokens[at : at + LOOK_AHEAD]
        return found if len(found) >= LEAST_AHEAD else (found * -(-LEAST_AHEAD // len(found)))[:LEAST_AHEAD]
