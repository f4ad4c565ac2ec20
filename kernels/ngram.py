"""Looks up n-grams in a sequence's tokens, for drafts without a model."""

from __future__ import annotations

from array import array

from kernels.cpu.loader import current
from kernels.cpu.ops import entry

TYPECODE = "i"
"""The type of the tokens in an array: int32."""


def latest_ngram_reference(tokens: array[int], longest: int, shortest: int) -> int:
    """Computes `latest_ngram` by its definition."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return end
    return 0


def latest_ngram(tokens: array[int], longest: int, shortest: int) -> int:
    """Returns the end of the latest earlier occurrence of the newest n tokens, which may overlap with them, or 0 if
    there is none. n is the largest one from `longest` down to `shortest`, at least 1, for which there is one. `tokens`
    has int32 (TYPECODE).
    """
    library = current()
    if library.handle is None:
        return latest_ngram_reference(tokens, longest, shortest)
    return entry(library, "ll_latest_ngram")(tokens.buffer_info()[0], len(tokens), longest, shortest)
