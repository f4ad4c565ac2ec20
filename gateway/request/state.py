"""What outlives the attempts of a request: its samples, its times, its account; and what workers are told of it.

A beam search has as many samples as beams are returned; nothing of them is known before its end. Independent of
workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from common import convert
from common.group_need import GroupNeed, blocks_of
from common.types import Branch, FinishReason, PromptSources, SamplingParams, Timings
from gateway.fleet.lost import internal, too_late
from gateway.intake.validate import ResolvedRequest
from gateway.request.detokenize import Detokenizers
from gateway.request.direct import Direct
from gateway.request.isolation import IsolationTicket
from gateway.request.sample import Piece, Sample, Summary
from protos.v1 import decode_pb2, prefill_pb2
from protos.v1 import types_pb2 as types_pb

MARGIN_S = 0.02
"""What a hop keeps of the time left for its own answer."""
Pieces = dict[int, Piece]
"""What one message brought, by sample."""


@dataclass(slots=True)
class RequestState:
    """Everything of one request that outlives an attempt. Times are `time.monotonic`'s."""

    request: ResolvedRequest
    samples: list[Sample]
    arrived: float
    digest: bytes = b""
    rank: int = 0
    """The priority with the workers, once it has a place."""
    num_open: int = 0
    """Samples that have not ended."""
    attempts: int = 0
    losses: int = 0
    entry: IsolationTicket = field(default_factory=lambda: IsolationTicket(lambda: None, alone=False))
    """With the prefill worker; of a suspect, until decode has gone on with it."""
    decoded_from: int = 0
    """`output_len` when the attempt began, then when its decode did."""
    times: Timings = field(default_factory=Timings)
    sources: PromptSources | None = None
    prompt_logprobs: Sequence[types_pb.TokenLogprob] = ()
    """Those that have not left yet."""
    handed_over: int = 0
    emitted_at: float = 0.0
    direct: Direct[Any] | None = None
    """The fast path to the client, if there is one."""

    @classmethod
    def begin(
        cls, request: ResolvedRequest, detokenizers: Detokenizers, digest: bytes, direct: Direct[Any] | None = None
    ) -> RequestState:
        count = request.sampling.num_sequences
        samples = [Sample(request, detokenizers, index) for index in range(count)]
        plain = not request.stop and request.sampling.logprobs is None and request.sampling.beam_width is None
        return cls(request, samples, time.monotonic(), digest, num_open=count, direct=direct if plain else None)

    @property
    def is_beam_search(self) -> bool:
        return self.request.sampling.beam_width is not None

    @property
    def open_samples(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.finish_reason is None]

    @property
    def output_len(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.output_ids) for sample in self.samples)

    @property
    def need(self) -> GroupNeed:
        request = self.request
        return GroupNeed(len(request.prompt_ids), request.stopping.max_tokens, request.sampling.width)

    def remaining_s(self) -> float:
        """Time left for a hop. DeadlineExceeded when there is none."""
        left = self.arrived + self.request.timeout_s - time.monotonic() - MARGIN_S
        if left <= 0:
            raise too_late(self.request.timeout_s)
        return left

    def took(self, **added_ns: int) -> None:
        """Add to the times: `queue_ns`, `prefill_ns`, `hand_over_ns`, `decode_ns`."""
        self.times = replace(self.times, **{name: getattr(self.times, name) + ns for name, ns in added_ns.items()})

    def summary(self) -> Summary:
        sources = self.sources or PromptSources()
        prompt_len = len(self.request.prompt_ids)
        return Summary(prompt_len, self.output_len, sources, self.handed_over, self.times, self.attempts)

    def blocks_to_come_back(self, block_size: int) -> int:
        """Blocks that the group needs to go on. A beam search starts over, so it must be able to reach its end."""
        need = self.need
        if self.is_beam_search:
            return need.blocks(block_size)
        shared = need.prompt_len // block_size
        lengths = [need.prompt_len + len(sample.output_ids) + 1 for sample in self.open_samples]
        return shared + sum(blocks_of(length, block_size) - shared for length in lengths)

    # --- what comes in

    def accept(self, pieces: Pieces, output: decode_pb2.SequenceOutput) -> bool:
        """Take what decode sent of one sample. True if that ended the sample here and the worker does not know it.

        Errors: WorkerLost for tokens that cannot be these.
        """
        if output.sample_index >= len(self.samples):
            raise internal("decode")
        sample = self.samples[output.sample_index]
        finish = convert.finish_reason_from_pb(output.finish_reason)
        self._add(pieces, sample, output.first_index, output.token_ids, output.logprobs, finish)
        if finish is not None and output.HasField("beam_score") and (piece := pieces.get(sample.index)) is not None:
            piece.beam_score = output.beam_score
        return finish is None and sample.finish_reason is not None

    def accept_first(self, pieces: Pieces, done: prefill_pb2.PrefillDone) -> list[Sample]:
        """Take the token that prefill drew for each branch. Returns the samples that the ticket goes on with.

        Errors: WorkerLost for an answer that is not to what was asked.
        """
        going, sent = [], [] if self.is_beam_search else self.open_samples
        if [token.sample_index for token in done.tokens] != [sample.index for sample in sent]:
            raise internal("prefill")
        for sample, token in zip(sent, done.tokens, strict=True):
            finish = convert.finish_reason_from_pb(token.finish_reason)
            details = [token.logprob] if token.HasField("logprob") else []
            self._add(pieces, sample, len(sample.output_ids), [token.token_id], details, finish)
            if finish is None:
                going.append(sample)
        branches = 1 if self.is_beam_search else len(going)
        if len(done.ticket.branches) != branches or self.is_beam_search != done.HasField("beam_candidates"):
            raise internal("prefill")
        return self.open_samples if self.is_beam_search else going

    def _add(
        self,
        pieces: Pieces,
        sample: Sample,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[types_pb.TokenLogprob],
        finish: FinishReason | None,
    ) -> None:
        if sample.finish_reason is not None:
            return
        piece = pieces.get(sample.index)
        if piece is None:
            piece = pieces[sample.index] = Piece(sample.index)
        sample.accept(piece, first_index, token_ids, logprobs, finish)
        if sample.finish_reason is not None:
            self.num_open -= 1

    # --- what goes out

    def prefill_request(self) -> prefill_pb2.PrefillRequest:
        request = self.request
        return prefill_pb2.PrefillRequest(
            request_id=request.request_id,
            attempt=self.attempts,
            cache_salt=request.salt,
            cache_quota=self._quota,
            public_tokens=request.public_tokens,
            prompt_token_ids=request.prompt_ids,
            branches=self._branches(self.open_samples),
            sampling=_sampling(request.sampling, with_prompt=self.sources is None),
            stopping=convert.stopping_to_pb(request.stopping),
            priority=self.rank,
        )

    def submit_request(self, done: prefill_pb2.PrefillDone, going: list[Sample]) -> decode_pb2.Submit:
        """For the attempt that prefill has just done. DeadlineExceeded when no time is left."""
        request = self.request
        return decode_pb2.Submit(
            request_id=request.request_id,
            attempt=self.attempts - 1,
            ticket=done.ticket,
            cache_salt=request.salt,
            cache_quota=self._quota,
            public_tokens=request.public_tokens,
            prompt_token_ids=request.prompt_ids,
            branches=self._branches(going),
            sampling=_sampling(request.sampling, with_prompt=False),
            stopping=convert.stopping_to_pb(request.stopping),
            priority=self.rank,
            timeout_ms=max(1, int(self.remaining_s() * 1000)),
            beam_candidates=done.beam_candidates if self.is_beam_search else None,
        )

    @property
    def _quota(self) -> types_pb.CacheQuota | None:
        quota = self.request.cache_quota
        return None if quota is None else convert.quota_to_pb(quota)

    def _branches(self, samples: list[Sample]) -> list[types_pb.Branch]:
        branches = [Branch()] if self.is_beam_search else [sample.branch for sample in samples]
        return [convert.branch_to_pb(branch) for branch in branches]


def tokens_of(ticket: types_pb.Ticket, block_size: int) -> int:
    """Token positions that a ticket hands over; those in blocks that branches share count once."""
    return sum(max(0, branch.num_tokens - branch.shared_blocks * block_size) for branch in ticket.branches)


def _sampling(params: SamplingParams, *, with_prompt: bool) -> types_pb.SamplingParams:
    """For a worker. Prompt log-probabilities are asked for once: they keep a prompt from using its cached prefix."""
    message = convert.sampling_to_pb(params)
    if not with_prompt:
        message.ClearField("prompt_logprobs")
    return message
