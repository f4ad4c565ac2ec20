"""Decides which beams of a beam search continue, which have ended, and when the search ends.

The search gives the same ids and scores as transformers' beam search without sampling (v5). Its input is the most
likely next tokens of each running beam, and its output names the beam that each new beam continues. With width w and e
stop tokens, one step is:

    all pairs (beam, token) -> the (1 + e) * w pairs (at least 2 * w) with the highest sums of log-probabilities
                               -> the pairs among the first w that end a beam: candidates for the w best ended beams
                               -> the first w pairs that do not end a beam: the new running beams

Sums and scores are fp32. Pairs with equal sums are ordered by the beam's index, and then by the token id. Of two ended
beams with equal scores, the older one comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from common.types import FinishReason, SamplingParams, StoppingParams, TokenLogprob


class Candidates(NamedTuple):
    """The most likely next tokens of one beam, the most likely first. If two tokens are equally likely, the token with
    the lower id comes first.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """fp32 log-probabilities, one for each token id."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A running beam, with its output tokens and the sum of their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One entry per token if log-probabilities were requested, else empty."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A beam that has ended, and its score."""

    token_ids: list[int]
    """Output tokens, including the stop token if there is one."""
    score: float
    """Sum of the log-probabilities / number of tokens ** length_penalty."""
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]


class _Continuation(NamedTuple):
    """A running beam and one more token."""

    parent: int
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """A beam search. Call `advance` with the candidates of each running beam until `done` is True.

    Args:
        sampling: width, length penalty, early stopping, number of returned beams, log-probabilities.
        stopping: stop tokens and the maximum number of tokens.
        prompt_len: number of prompt tokens, less than `max_model_len`.
        max_model_len: the maximum number of tokens of prompt and output together.
    """

    def __init__(self, sampling: SamplingParams, stopping: StoppingParams, prompt_len: int, max_model_len: int) -> None:
        self._sampling = sampling
        self._stopping = stopping
        self._stop_ids = frozenset(stopping.stop_token_ids)
        self._max_tokens = min(stopping.max_tokens, max_model_len - prompt_len)
        # Each beam has at most one continuation per stop token, so at least `width` of these do not end.
        self._num_kept = max(2, 1 + len(self._stop_ids)) * sampling.width
        self._ended: list[Hypothesis] = []  # best first, at most `width`
        self._num_tokens = 0
        self.num_candidates = max(self._num_kept, sampling.logprobs or 0)
        """Number of most likely next tokens that `advance` needs for each beam, or the whole vocabulary if it is
        smaller.
        """
        self.running = [Beam()]
        """The beams to compute next, best first: initially one beam without output tokens, and none when the search is
        complete.
        """

    @property
    def done(self) -> bool:
        """Whether the search is complete."""
        return not self.running

    def advance(self, candidates: Sequence[Candidates]) -> list[int]:
        """Advances each running beam by one token. `candidates[i]` belongs to `running[i]`. Returns, for every new
        running beam, the index of the old beam that the new beam continues. An old beam whose index occurs more than
        once is forked, and an old beam whose index does not occur is dropped.
        """
        self._num_tokens += 1
        going: list[_Continuation] = []
        for rank, continuation in enumerate(self._most_likely(candidates)):
            reason = self._finish_reason(continuation.token_id)
            if reason is None:
                going.append(continuation)
            elif rank < self._sampling.width:
                self._end(self._extended(continuation, candidates), reason)
        going = going[: self._sampling.width]
        if not self._goes_on(going):
            going = []
        self.running = [self._extended(continuation, candidates) for continuation in going]
        return [continuation.parent for continuation in going]

    def best(self) -> list[Hypothesis]:
        """Returns the requested number of ended beams, the best first. Call this when `done` is True."""
        return self._ended[: self._sampling.num_sequences]

    def _most_likely(self, candidates: Sequence[Candidates]) -> list[_Continuation]:
        """Returns the continuations with the highest sums among those of all running beams, the best first."""
        counts = [len(c.token_ids) for c in candidates]
        parents = np.repeat(np.arange(len(counts)), counts)
        tokens = np.concatenate([c.token_ids for c in candidates])
        sums = np.concatenate([np.array(c.logprobs, np.float32) for c in candidates])
        sums += np.repeat(np.array([beam.cumulative_logprob for beam in self.running], np.float32), counts)
        order = np.lexsort((tokens, parents, -sums))[: self._num_kept]
        columns = (parents[order].tolist(), tokens[order].tolist(), sums[order].tolist())
        return list(map(_Continuation, *columns))

    def _finish_reason(self, token_id: int) -> FinishReason | None:
        if token_id in self._stop_ids and self._num_tokens >= self._stopping.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._num_tokens >= self._max_tokens else None

    def _end(self, beam: Beam, reason: FinishReason) -> None:
        score = self._score(beam.cumulative_logprob, self._num_tokens)
        self._ended.append(Hypothesis(beam.token_ids, score, reason, beam.logprobs))
        self._ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self._ended[self._sampling.width :]

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        return float(np.float32(cumulative_logprob) / np.float32(num_tokens**self._sampling.length_penalty))

    def _goes_on(self, going: Sequence[_Continuation]) -> bool:
        """Returns whether `going` may still change the result under the requested early-stopping rule."""
        if not going or len(self._ended) < self._sampling.width:
            return bool(going)
        early_stopping, length_penalty = self._sampling.early_stopping, self._sampling.length_penalty
        if early_stopping is True:
            return False
        # A positive penalty favors long beams. In the best case, this beam ends at the limit with its current sum.
        furthest = early_stopping == "never" and length_penalty > 0.0
        length = self._max_tokens if furthest else self._num_tokens
        return self._score(going[0].cumulative_logprob, length) > self._ended[-1].score

    def _extended(self, continuation: _Continuation, candidates: Sequence[Candidates]) -> Beam:
        parent, token_id, cumulative_logprob = continuation
        beam = self.running[parent]
        logprobs = beam.logprobs
        if self._sampling.logprobs is not None:
            logprobs = [*logprobs, _token_logprob(token_id, candidates[parent], self._sampling.logprobs)]
        return Beam([*beam.token_ids, token_id], cumulative_logprob, logprobs)


def _token_logprob(token_id: int, candidates: Candidates, count: int) -> TokenLogprob:
    """Returns the log-probabilities of a beam's newest token and of the `count` most likely tokens. Tokens with equal
    log-probabilities have the same rank.
    """
    ids, values = candidates
    logprob = values[ids.index(token_id)]
    top = tuple(zip(ids[:count], values[:count], strict=True))
    return TokenLogprob(token_id, logprob, values.index(logprob) + 1, top)
