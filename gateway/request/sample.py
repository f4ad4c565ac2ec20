"""Keeps one sample of a request: its accepted tokens, its text, its stop strings and its end. This module does not call
workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.types import Branch, FinishReason
from gateway.fleet.worker_lost import WorkerLost
from gateway.intake.resolved_request import ResolvedRequest
from gateway.request.delta import Delta
from gateway.request.detokenize import Detokenizers
from gateway.request.outlet import Outlet
from gateway.request.stops import StopMatcher
from protos.v1 import types_pb2 as pb


class Sample:
    """A sample of a request as the client sees it. It accepts tokens with their indices and produces deltas."""

    __slots__ = ("_cumulative_logprob", "_detokenizer", "_has_stops", "_include_stop", "_matcher", "_stop_ids",
                 "_stopping", "delta", "finish_reason", "index", "left_at", "output_ids")  # fmt: skip

    def __init__(self, request: ResolvedRequest, detokenizers: Detokenizers, index: int = 0) -> None:
        self.index = index
        self._stopping = request.stopping
        self._stop_ids = frozenset(request.stopping.stop_token_ids)
        self._include_stop = request.include_stop
        self._detokenizer = detokenizers.begin(
            request.prompt_ids, request.shown_special, skip_special=request.skip_special_tokens
        )
        self._matcher = StopMatcher(request.stop, include_in_output=request.include_stop)
        self._has_stops = bool(request.stop)
        self._cumulative_logprob = 0.0
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.delta: Delta | None = None
        """The sample's pending delta in the request's outlet."""
        self.left_at = 0.0
        """When the sample's last delta was sent, or 0 before the first."""

    @property
    def branch(self) -> Branch:
        """The data that a worker needs to continue the sample."""
        return Branch(self.index, tuple(self.output_ids), self._cumulative_logprob)

    def accept(
        self,
        outlet: Outlet,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Iterable[pb.TokenLogprob],
        finish: FinishReason | None,
    ) -> None:
        """Adds tokens, of which the first has the index `first_index`, to the sample and to its delta. Tokens that are
        already known, or that follow the sample's end, are dropped. Raises WorkerLost if tokens are missing, or if
        `finish` comes without a new token.
        """
        known = len(self.output_ids) - first_index
        fresh, details = token_ids[known:], list(logprobs)[known:]
        if known < 0 or (finish is not None and not fresh):
            raise WorkerLost("gap")
        for number, token_id in enumerate(fresh):
            if self.finish_reason is not None:
                return
            delta, last = self._pending(outlet), number == len(fresh) - 1
            self._add(delta, token_id, finish if last else None)
            if details:
                delta.logprobs.append(details[number])
                self._cumulative_logprob += details[number].logprob

    def accept_token(self, outlet: Outlet, index: int, token_id: int) -> None:
        """Adds a single token that has no log-probability and with which the worker does not end the sample. This is a
        fast path of `accept`.
        """
        if self._has_stops or index != len(self.output_ids):
            return self.accept(outlet, index, (token_id,), (), None)
        self.output_ids.append(token_id)
        delta = self.delta or self._pending(outlet)
        delta.token_ids.append(token_id)
        delta.text += self._detokenizer.add(token_id)

    def take_embedding(self, outlet: Outlet, embedding: Sequence[float]) -> None:
        """Ends the sample with the prompt's embedding."""
        delta = self._pending(outlet)
        delta.embedding = embedding
        self.finish_reason = delta.finish_reason = FinishReason.STOP

    def _pending(self, outlet: Outlet) -> Delta:
        if self.delta is None:
            self.delta = Delta(self.index)
            outlet.pending.append(self.delta)
        return self.delta

    def _add(self, delta: Delta, token_id: int, finish: FinishReason | None) -> None:
        self.output_ids.append(token_id)
        delta.token_ids.append(token_id)
        may_stop = len(self.output_ids) >= self._stopping.min_tokens
        stopped_by_token = finish is FinishReason.STOP and token_id in self._stop_ids
        if not stopped_by_token or self._include_stop:
            delta.text += self._matcher.feed(self._detokenizer.add(token_id), may_stop=may_stop)
        if finish is not None and self._matcher.matched is None:
            delta.text += self._matcher.feed(self._detokenizer.flush(), may_stop=may_stop)
        if self._matcher.matched is not None:
            finish, delta.stop_string = FinishReason.STOP, self._matcher.matched
        elif finish is not None:
            delta.text += self._matcher.flush()
            delta.stop_token_id = token_id if stopped_by_token else None
        self.finish_reason = delta.finish_reason = finish
