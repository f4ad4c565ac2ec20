"""Predicts the times between which routing chooses: to compute a prompt, to copy its blocks to another arena, and to
wait for decode. No I/O, the time is an argument.

Prefill workers report their rate. Copies and decode times are measured by this gateway on its own requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from common.line_fit import LineFit
from common.types import WorkerLoad

USUAL_PROMPT_TOKENS_PER_S = 2_000.0
"""Rate of a prefill worker before any has reported one."""
USUAL_COPY_START_S = 0.01
USUAL_COPY_TOKEN_S = 1e-4
"""Time to copy a token's KV before a copy between two arenas has been measured: 128 KiB over 10 Gbit/s."""
USUAL_DECODE_S = 5.0
"""Time for which a group decodes before this gateway has seen one end."""
MEMORY_S = 300.0
"""Time constant with which measured copies are forgotten, so that a link that was slow once is tried again."""
_USUAL_TOKENS = 1_000
"""Length of the usual copy beside which measured copies are seen."""
_SLOWER_IN_FULL_BATCH = 0.5
"""How much longer a group decodes in a full batch than alone. It is 0 if a step's time does not depend on the batch,
because the step reads the weights, and 1 if computing a sequence takes as long as reading the weights.
"""
_DECODE_STEP = 0.05
"""Weight of one group in the mean time of decoding."""


class _CopyTime:
    """The time to copy tokens from one arena to another."""

    def __init__(self) -> None:
        start, whole = USUAL_COPY_START_S, USUAL_COPY_START_S + _USUAL_TOKENS * USUAL_COPY_TOKEN_S
        self._fit = LineFit([(0, start), (_USUAL_TOKENS, whole)])
        self._at = -math.inf

    def note(self, num_tokens: int, seconds: float, now: float) -> None:
        self._forget(now)
        self._fit.note(num_tokens, seconds)

    def seconds(self, num_tokens: int, now: float) -> float:
        self._forget(now)
        return self._fit.at(num_tokens)

    def _forget(self, now: float) -> None:
        self._fit.fade(math.exp((self._at - now) / MEMORY_S))
        self._at = now


class RouteCosts:
    """The predictions, in seconds, and the measurements behind them."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], _CopyTime] = {}
        """By source arena and destination arena."""
        self._decode_s = USUAL_DECODE_S

    def note_copy(self, source: str, destination: str, num_tokens: int, seconds: float, now: float) -> None:
        """Records a copy between two arenas."""
        self._copies.setdefault((source, destination), _CopyTime()).note(num_tokens, seconds, now)

    def note_decode(self, seconds: float) -> None:
        """Records how long a group was at its decode worker."""
        self._decode_s += _DECODE_STEP * (seconds - self._decode_s)

    def keep(self, arena_ids: Iterable[str]) -> None:
        """Forgets the copies of all other arenas."""
        live = set(arena_ids)
        self._copies = {pair: copy for pair, copy in self._copies.items() if live.issuperset(pair)}

    def prefill_s(self, num_tokens: int, load: WorkerLoad, others: Iterable[WorkerLoad]) -> float:
        """Returns the time in which a worker computes this number of tokens. A worker that has not measured its rate is
        as fast as the `others` are on average.
        """
        rate = load.prompt_tokens_per_s
        if not rate:
            known = [other.prompt_tokens_per_s for other in others if other.prompt_tokens_per_s]
            rate = sum(known) / len(known) if known else USUAL_PROMPT_TOKENS_PER_S
        return num_tokens / rate

    def copy_s(self, source: str, destination: str, num_tokens: int, now: float) -> float:
        """Returns the time to copy the KV of `num_tokens` tokens; 0.0 within an arena."""
        if source == destination:
            return 0.0
        return self._copies.get((source, destination), _CopyTime()).seconds(num_tokens, now)

    def decode_s(self, share: float) -> float:
        """Returns the time that a group loses at a decode worker whose batch is taken by `share` (above 1.0: sequences
        wait): until it has a place, and because steps of larger batches take longer.
        """
        return self._decode_s * (max(0.0, share - 1.0) + _SLOWER_IN_FULL_BATCH * min(1.0, share))
