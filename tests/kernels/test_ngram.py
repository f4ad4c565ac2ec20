"""The look-up of n-grams: every build finds what the definition finds."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import cpu
from kernels.ngram import TYPECODE, latest_ngram, latest_ngram_reference


@st.composite
def texts(draw: st.DrawFn) -> tuple[array[int], int, int]:
    """Returns tokens of a small vocabulary, and the largest and the smallest n."""
    tokens = draw(st.lists(st.integers(0, draw(st.integers(0, 3))), min_size=1, max_size=40))
    shortest = draw(st.integers(1, 5))
    return array(TYPECODE, tokens), draw(st.integers(shortest, 16)), shortest


@pytest.mark.parametrize("isa", [*cpu.supported_isas(), "reference"])
@given(text=texts())
def test_an_n_gram_is_found_by_its_definition(isa: cpu.Isa, text: tuple[array[int], int, int]) -> None:
    tokens, longest, shortest = text
    found = [
        (size, end)
        for size in range(shortest, longest + 1)
        for end in range(size, len(tokens))
        if tokens[end - size : end] == tokens[-size:]
    ]
    expected = max(found, default=(0, 0))[1]
    with cpu.using(isa):
        assert latest_ngram(tokens, longest, shortest) == expected == latest_ngram_reference(*text)


def test_large_token_ids_are_compared_in_full(isa: cpu.Isa) -> None:
    high = (1 << 31) - 1
    assert latest_ngram(array(TYPECODE, [high, 5, high - 1, 6, high]), 2, 1) == 1
