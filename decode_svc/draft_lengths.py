"""Chooses how many tokens of each prediction a step verifies. The functions are pure.

Plain decoding gains one token per sequence in t(n) seconds, for n sequences. Each further row adds time. A row's
expected gain is the probability that the row's token and all earlier tokens of the draft are right. Rows are added in
descending order of their gain, and the number of rows with the highest expected rate of tokens per second is chosen.

A draft model also takes time: drafts of up to k tokens need k passes of the draft model. Pass i has a row for each
draft of at least i tokens. The first pass also has rows for the tokens that the draft model has not seen yet.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

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
    unseen: int = 1
    """Number of rows that the draft model needs for its first prediction."""


TimeOf = Callable[[int], float]
"""A function that returns the estimated time in seconds of a step with the given number of rows, or 0.0 if nothing is
known.
"""


class Choose(Protocol):
    """The type of `best_lengths`."""

    def __call__(
        self, options: Seq[Option], num: int, max_rows: int, time_of: TimeOf, draft_time_of: TimeOf | None = None, /
    ) -> list[int]: ...


def best_lengths(
    options: Seq[Option], num: int, max_rows: int, time_of: TimeOf, draft_time_of: TimeOf | None = None
) -> list[int]:
    """Returns the length of each of the `num` sequences' drafts, in a step of at most `max_rows` rows. `draft_time_of`
    is for the passes of a draft model; None means that predictions take no time.
    """
    lens, gains = [0] * num, list[tuple[float, int, int, int]]()
    for index, rate, room, unseen in options:
        gain = rate
        for depth in range(room):
            if gain < LEAST_GAIN:
                break
            gains.append((gain, index, depth, 1 if depth else unseen))
            gain *= rate
    if not gains or (plain_s := time_of(num)) == 0.0:
        return lens
    gains.sort(key=lambda row: row[0], reverse=True)
    best, num_best, expected = MARGIN * num / plain_s, 0, float(num)
    passes, passes_s = [0] * (1 + max(depth for _, _, depth, _ in gains)), 0.0
    for count, (gain, _, depth, rows) in enumerate(gains[: max(0, max_rows - num)], 1):
        expected += gain
        if draft_time_of is not None:
            passes_s -= draft_time_of(passes[depth]) if passes[depth] else 0.0
            passes[depth] += rows
            passes_s += draft_time_of(passes[depth])
        if expected > best * (seconds := time_of(num + count) + passes_s):
            best, num_best = expected / seconds, count
    for _, index, _, _ in gains[:num_best]:
        lens[index] += 1
    return lens


def saved_share(options: Seq[Option], lens: Seq[int], time_of: TimeOf, draft_time_of: TimeOf) -> float:
    """Returns the part of the time of plain decoding that drafts of these lengths are expected to save, at least 0."""
    expected, passes_s = float(len(lens)), 0.0
    for depth in range(max(lens)):
        drafted = [option for option in options if lens[option.place] > depth]
        expected += sum(option.rate ** (depth + 1) for option in drafted)
        passes_s += draft_time_of(sum(1 if depth else option.unseen for option in drafted))
    seconds = time_of(len(lens) + sum(lens)) + passes_s
    return max(0.0, 1.0 - seconds * len(lens) / (expected * time_of(len(lens))))
