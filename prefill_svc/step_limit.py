"""Limits how long a prefill step takes where prefill and decode take turns on the same cores. Between two tokens of a
stream there is one prefill step, so the limit bounds the inter-token latency. The module reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_DECAY = 0.8
"""Factor by which a step multiplies the weights of all earlier ones, so that about the last five count."""
_SHAPE_DECAY = 0.98
"""Likewise, for the ratio of the costs of a pair and a token. The ratio is a property of the model and the CPU, and a
few short prompts say little about it.
"""
_MOST_GROWTH = 2.0
"""A step counts as at most this many times as long as expected, so that a pause of the machine is soon forgotten."""
_CLEAR_PAIRS = 256.0
"""If the tokens of recent steps attended to fewer positions than about this many, pairs took a small part of the time,
and the fit of their cost is mostly noise. The cost is therefore assumed to be small (a ridge regression).
"""
DEFAULT_S = 0.125
"""The time in seconds that a prefill step and a decode step may take together by default."""
_LEAST_RATIO = 6.0
"""By default, a prefill step may take this many times as long as a decode step even if both together exceed DEFAULT_S.
Decode steps therefore extend the time to compute a prompt by at most a sixth, however slow the machine is.
"""
_LEAST_SHARE = 0.25
"""The part of a given limit that a prefill step may take even if decode steps take more than the rest."""
_MOST_REST = 0.25
"""The part of the limit that the rest of a step takes at most from its pass. With a slow ledger, short passes would not
keep the limit either, but would multiply the time that prompts take.
"""
_OTHERS_WEIGHT = 0.3
LEAST_CHUNK = 16
"""Number of tokens that a step may compute even if they are expected to take longer than the limit."""


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """A chunk costs `token_s` seconds per token, and `pair_s` seconds per pair of a token and a position that it
    attends to.
    """

    token_s: float
    pair_s: float

    def seconds(self, start: int, num_tokens: int) -> float:
        """Returns the time of a chunk of `num_tokens` tokens that begins at position `start`."""
        return self.token_s * num_tokens + self.pair_s * num_pairs(start, num_tokens)

    def most_tokens(self, start: int, seconds: float) -> float:
        """Returns the number of tokens of a chunk at `start` that takes `seconds`."""
        linear = self.token_s + self.pair_s * start
        both = linear + math.sqrt(linear * linear + 2 * self.pair_s * seconds)
        return 2 * seconds / both if both else math.inf


def num_pairs(start: int, num_tokens: int) -> float:
    """Returns the approximate number of pairs of one of a chunk's tokens and a position at or before it."""
    return num_tokens * (start + num_tokens / 2)


class StepLimit:
    """A limit on the duration of prefill steps, and the cost of a chunk, fitted by least squares to recent steps."""

    def __init__(self, max_itl_s: float | None, waited_s: Callable[[], float], decodes: Callable[[], bool]) -> None:
        """`max_itl_s` is the time in seconds that a prefill step and a decode step may take together; None: the
        default. `waited_s` returns how long the step thread waited for its present turn, which is about the time of a
        decode step. `decodes` returns whether a decode worker on the same cores has work.
        """
        self._max_itl_s = max_itl_s
        self._waited_s = waited_s
        self._decodes = decodes
        self._others_s = self._rest_s = 0.0
        self._starts_decode = False
        """Whether the last step handed over a sequence, of which the decode worker may not know yet."""
        self._sums = [0.0] * 3
        """The sums of tokens, pairs and seconds."""
        self._products = [0.0] * 5
        """The sums of tokens, pairs, pairs² / tokens, seconds and pairs * seconds / tokens. Dividing by the number of
        tokens gives every token the same weight.
        """

    def note_step(self, chunks: Sequence[tuple[int, int]], seconds: float, rest_s: float, starts_decode: bool) -> None:
        """Records the duration of a step's forward pass, that of the rest of the step, and whether the step handed over
        a sequence. Each chunk is its first position and its number of tokens.
        """
        self._starts_decode = starts_decode
        self._others_s += _OTHERS_WEIGHT * (self._waited_s() - self._others_s)
        self._rest_s += _OTHERS_WEIGHT * (rest_s - self._rest_s)
        if expected := sum(self.cost.seconds(*chunk) for chunk in chunks):
            seconds = min(seconds, _MOST_GROWTH * expected)
        tokens = sum(num_tokens for _, num_tokens in chunks)
        pairs = sum(num_pairs(*chunk) for chunk in chunks)
        self._sums = _decayed(self._sums, (tokens, pairs, seconds), _DECAY)
        products = (tokens, pairs, pairs * pairs / tokens, seconds, pairs * seconds / tokens)
        self._products = _decayed(self._products, products, _SHAPE_DECAY)

    @property
    def cost(self) -> ChunkCost:
        """The fitted cost, neither part of which is negative. Both are 0.0 before the first step. The ratio of the two
        parts is that of many steps, and the level that of the latest ones.
        """
        tokens, pairs, seconds = self._sums
        if not seconds:
            return ChunkCost(0.0, 0.0)
        tt, tp, pp, ty, py = self._products
        pp += _CLEAR_PAIRS * _CLEAR_PAIRS * tt
        of_token, of_pair = max(0.0, pp * ty - tp * py), max(0.0, tt * py - tp * ty)
        level = seconds / (of_token * tokens + of_pair * pairs)
        return ChunkCost(level * of_token, level * of_pair)

    @property
    def step_s(self) -> float:
        """The time in seconds that the next forward pass may take. It is infinite if nothing decodes."""
        if not self._starts_decode and not self._decodes():
            return math.inf
        limit_s = DEFAULT_S if self._max_itl_s is None else self._max_itl_s
        left_s = limit_s - self._others_s - min(self._rest_s, _MOST_REST * limit_s)
        least_s = _LEAST_RATIO * self._others_s if self._max_itl_s is None else _LEAST_SHARE * limit_s
        return max(left_s, least_s)


def _decayed(sums: Sequence[float], seen: Sequence[float], factor: float) -> list[float]:
    return [factor * value + new for value, new in zip(sums, seen, strict=True)]


class StepBudget:
    """What is left of a step while it is planned: a number of tokens, and a time if there is a limit on it."""

    def __init__(self, tokens: int, limit: StepLimit | None = None) -> None:
        self._tokens = tokens
        self._seconds = math.inf if limit is None else limit.step_s
        self._cost = None if limit is None or math.isinf(self._seconds) else limit.cost
        self._least = LEAST_CHUNK

    def most_tokens(self, start: int) -> int:
        """Returns the number of tokens that a chunk at position `start` may have. The step's first chunk may have at
        least LEAST_CHUNK tokens.
        """
        if self._cost is None:
            return self._tokens
        in_time = self._cost.most_tokens(start, max(0.0, self._seconds))
        return int(min(self._tokens, max(self._least, in_time)))

    def take(self, start: int, num_tokens: int) -> None:
        """Subtracts a chunk."""
        self._tokens -= num_tokens
        self._least = 0
        if self._cost is not None:
            self._seconds -= self._cost.seconds(start, num_tokens)

    @property
    def is_spent(self) -> bool:
        """Whether not even a chunk at position 0 fits."""
        return self.most_tokens(0) == 0
