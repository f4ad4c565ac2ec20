"""Stop strings: the text does not depend on its division into deltas, and no part of a stop string is sent."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.request.stops import StopMatcher

TEXT = st.text(alphabet="abcé\U0001f600", max_size=40)
STOPS = st.lists(st.text(alphabet="abcé\U0001f600", min_size=1, max_size=4), min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_in_output=include)
    out = ""
    for piece in pieces:
        out += matcher.feed(piece)
        if matcher.matched is not None:
            return out, matcher.matched
    return out + matcher.flush(), None


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Finds the first position at which a stop string is complete, character by character. The longest match wins."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TEXT, STOPS, st.lists(st.integers(0, 40), max_size=8), st.booleans())
def test_the_result_does_not_depend_on_the_pieces(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(pieces, stops, include) == reference(text, stops, include)


@given(TEXT, STOPS)
def test_text_that_has_gone_out_never_holds_the_beginning_of_the_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for char in text:
        out += matcher.feed(char)
        if matcher.matched is not None:
            break
        assert text.startswith(out) and len(text) - len(out) >= 0
    assert not any(stop in out for stop in stops)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["###", "END"])
    assert matcher.feed("text #") == "text "
    assert matcher.feed("#x E") == "##x "
    assert matcher.feed("NX") == "ENX"


def test_before_min_tokens_a_stop_string_is_only_text() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab", may_stop=False) == "ab" and matcher.matched is None
    assert matcher.feed("a", may_stop=False) == ""
    assert matcher.feed("b!") == "" and matcher.matched == "ab"
