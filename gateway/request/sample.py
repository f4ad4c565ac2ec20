"""What a request has produced: accepted tokens by index, text, stop strings, the end. Independent of workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from common.types import Branch, FinishReason, PromptSources, Timings
from gateway.fleet.lost import WorkerLost
from gateway.intake.validate import ResolvedRequest
from gateway.request.detokenize import Detokenizers
from gateway.request.stops import StopMatcher
from protos.v1 import types_pb2 as pb


@dataclass(frozen=True, slots=True)
class Summary:
    """The account of a finished request."""

    prompt_tokens: int
    completion_tokens: int
    sources: PromptSources
    handed_over_tokens: int
    timings: Timings
    attempts: int


@dataclass(slots=True)
class Piece:
    """What became known of a sample at once. A sample's last has `finish_reason`, the request's last `summary` too."""

    index: int = 0
    """The sample's number; of a beam search the beam's rank."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[pb.TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    beam_score: float | None = None
    summary: Summary | None = None


class Sample:
    """One sample as the client sees it: tokens come in with their index, pieces go out."""

    def __init__(self, request: ResolvedRequest, detokenizers: Detokenizers, index: int = 0) -> None:
        self.index = index
        self._stopping = request.stopping
        self._stop_ids = frozenset(request.stopping.stop_token_ids)
        self._include_stop = request.include_stop
        self._detokenizer = detokenizers.begin(request.prompt_ids)
        self._matcher = StopMatcher(request.stop, include_in_output=request.include_stop)
        self._cumulative_logprob = 0.0
        self.output_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.emitted_at = 0.0
        """When its last piece left, 0 before the first."""

    @property
    def branch(self) -> Branch:
        """What a worker must know to go on."""
        return Branch(self.index, tuple(self.output_ids), self._cumulative_logprob)

    def accept(
        self,
        piece: Piece,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Iterable[pb.TokenLogprob],
        finish: FinishReason | None,
    ) -> None:
        """Add tokens to the sample and to `piece`. Known ones are dropped; a gap is refused (WorkerLost)."""
        known = len(self.output_ids) - first_index
        fresh, details = token_ids[known:], list(logprobs)[known:]
        if known < 0 or (finish is not None and not fresh):
            raise WorkerLost("gap")
        for number, token_id in enumerate(fresh):
            if self.finish_reason is not None:
                return
            last = number == len(fresh) - 1
            self._add(piece, token_id, finish if last else None)
            if details:
                piece.logprobs.append(details[number])
                self._cumulative_logprob += details[number].logprob

    def accept_plain(self, first_index: int, token_ids: Sequence[int]) -> str | None:
        """Add the next tokens of a sample that goes on and has no stop strings; returns their text. None: they are not
        the next ones, and nothing was added."""
        if first_index != len(self.output_ids) or self.finish_reason is not None:
            return None
        self.output_ids += token_ids
        return "".join(map(self._detokenizer.add, token_ids))

    def _add(self, piece: Piece, token_id: int, finish: FinishReason | None) -> None:
        self.output_ids.append(token_id)
        piece.token_ids.append(token_id)
        may_stop = len(self.output_ids) >= self._stopping.min_tokens
        stopped_by_token = finish is FinishReason.STOP and token_id in self._stop_ids
        if not stopped_by_token or self._include_stop:
            piece.text += self._matcher.feed(self._detokenizer.add(token_id), may_stop=may_stop)
        if finish is not None and self._matcher.matched is None:
            piece.text += self._matcher.feed(self._detokenizer.flush(), may_stop=may_stop)
        if self._matcher.matched is not None:
            finish, piece.stop_string = FinishReason.STOP, self._matcher.matched
        elif finish is not None:
            piece.text += self._matcher.flush()
            piece.stop_token_id = token_id if stopped_by_token else None
        self.finish_reason = piece.finish_reason = finish
