"""Checks whether an answer is about both requested characters.

Half of the pairs are common in stories; the other half are rare.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .grammar import with_article

PAIRS = (
    ("fox", "crow"), ("cat", "mouse"), ("king", "dragon"), ("lion", "mouse"), ("wolf", "lamb"),
    ("girl", "bear"), ("princess", "frog"), ("hare", "tortoise"), ("owl", "fisherman"), ("boy", "elephant"),
)  # fmt: skip
LEAST = 2
"""The minimum number of times that a story must name each of the two characters."""


def request(pair: tuple[str, str]) -> str:
    """Returns the plain request for a story about the two characters."""
    return f"Tell me a story about {with_article(pair[0])} and {with_article(pair[1])}"


def tells_of(story: str, pair: tuple[str, str]) -> bool:
    """Returns whether the text names each of the two characters at least LEAST times, in the singular."""
    return all(len(re.findall(rf"\b{noun}\b", story, re.IGNORECASE)) >= LEAST for noun in pair)


def rates(answer: Callable[[str, int], tuple[str, bool]], seeds: range) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns, for each pair, (number of stories about both characters, number of answers that ended by themselves).
    `answer(request, seed)` returns (text, whether it ended).
    """
    found = {}
    for pair in PAIRS:
        told = [answer(request(pair), seed) for seed in seeds]
        found[pair] = (sum(tells_of(text, pair) for text, _ in told), sum(ended for _, ended in told))
    return found
