"""Chooses how many tokens of each prediction a step verifies. The functions are pure.

Plain decoding gains one token per sequence in t(n) seconds, for n sequences. Each further row adds time. A row's
expected gain is the probability that the row's token and all earlier tokens of the draft are right. Rows are added in
descending order of their gain, and the number of rows with the highest expected rate of tokens per second is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

MARGIN = 1.04
"""Factor by which the expected rate must exceed that of plain decoding, because times and gains are estimates."""
LEAST_GAIN = 0.05
"""Rows that are expected to gain fewer tokens than this are not considered."""


class Option(NamedTuple):
    """A sequence whose next tokens have been predicted, as one of the sequences of a step."""

    place: int
    """The sequence's place in the step."""
    rate: float
    """Probability that the next token of the prediction is right."""
    room: int
    """Maximum number of tokens that can be verified."""


TimeOf = Callable[[int], float]
"""A function that returns the estimated time in seconds of a step with the given number of rows, or 0.0 if nothing is
known.
"""
Choose = Callable[[Seq[Option], int, int, TimeOf], list[int]]
"""The type of `best_lengths`."""


def best_lengths(options: Seq[Option], num: int, max_rows: int, time_of: TimeOf) -> list[int]:
    """Returns the length of each of the `num` sequences' drafts, in a step of at most `max_rows` rows."""
    lens, gains = [0] * num, list[tuple[float, int]]()
    for index, rate, room in options:
        gain = rate
        while room > 0 and gain >= LEAST_GAIN:
            gains.append((gain, index))
            gain, room = gain * rate, room - 1
    if not gains or (plain_s := time_of(num)) == 0.0:
        return lens
    gains.sort(reverse=True)
    best, num_best, expected = MARGIN * num / plain_s, 0, float(num)
    for count, (gain, _) in enumerate(gains[: max(0, max_rows - num)], 1):
        expected += gain
        if expected > best * (seconds := time_of(num + count)):
            best, num_best = expected / seconds, count
    for _, index in gains[:num_best]:
        lens[index] += 1
    return lens
