"""Keeps the state of a request across attempts: its samples, times and counts. It also builds the messages to workers.

A beam search has as many samples as beams to return, and the samples have no content before the search ends. This
module does not call workers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common import convert
from common.group_need import GroupNeed, most_held
from common.kv_retention import KvRules
from common.tracing import NO_TRACER, Tracer
from common.types import Branch, PromptSources, SamplingParams, Timings
from gateway.fleet.routing import Route
from gateway.fleet.worker_lost import internal, too_late
from gateway.intake.resolved_request import ResolvedRequest
from gateway.metrics import Metrics
from gateway.request.delta import Delta, Summary
from gateway.request.detokenize import Detokenizers
from gateway.request.explanation import Explanation
from gateway.request.head_start import HeadStart
from gateway.request.outlet import Outlet
from gateway.request.sample import Sample
from gateway.request.trace import RequestTrace
from protos.v1 import decode_pb2, prefill_pb2
from protos.v1 import types_pb2 as types_pb

MARGIN_S = 0.02
"""The part of the remaining time, in seconds, that the gateway reserves for its own answer."""


@dataclass(slots=True)
class RequestState:
    """The data of one request, kept across attempts. `arrived` and `left_at` are seconds of `time.monotonic`."""

    request: ResolvedRequest
    samples: list[Sample]
    outlet: Outlet
    """The outlet for accepted tokens."""
    metrics: Metrics
    arrived: float
    explanation: Explanation
    trace: RequestTrace
    digest: bytes = b""
    head_start: HeadStart | None = None
    """A prefill that another call has made, until the first attempt takes it over."""
    rank: int = 0
    """The priority at the workers, set when the request gets its place."""
    num_open: int = 0
    """Number of samples that have not ended."""
    outcome: str = "abort"
    """How the request ended: the finish reason of its last delta, or "error". Before that, it is "abort"."""
    attempts: int = 0
    losses: int = 0
    decoded_from: int = 0
    """`output_len` at the beginning of the attempt or, later, of its decode."""
    times: Timings = field(default_factory=Timings)
    sources: PromptSources | None = None
    prompt_logprobs: Sequence[types_pb.TokenLogprob] = ()
    """The prompt's log-probabilities that have not been sent yet."""
    handed_over: int = 0
    transferred: int = 0
    """Number of token positions that were copied between arenas."""
    left_at: float = 0.0
    """When the last delta was sent, or 0 before the first."""

    @classmethod
    def begin(
        cls, request: ResolvedRequest, detokenizers: Detokenizers, digest: bytes, outlet: Outlet, metrics: Metrics,
        tracer: Tracer = NO_TRACER,
    ) -> RequestState:  # fmt: skip
        count = request.sampling.num_sequences
        samples = [Sample(request, detokenizers, index) for index in range(count)]
        told = Explanation(request.request_id, request.tenant, request.sampling.width, request.received_ns)
        trace = RequestTrace(tracer, request, metrics.model_name, told)
        return cls(request, samples, outlet, metrics, time.monotonic(), told, trace, digest, num_open=count)

    def begin_attempt(self, route: Route) -> None:
        self.attempts += 1
        self.explanation.begin_attempt(route.prefill.worker_id, route.considered, self.output_len)
        self.trace.begin_attempt()

    @property
    def is_beam_search(self) -> bool:
        return self.request.sampling.beam_width is not None

    @property
    def is_heard_of(self) -> bool:
        """Whether decode sends tokens of the request before the request ends."""
        return not self.is_beam_search and self.request.pooling is None

    @property
    def open_samples(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.finish_reason is None]

    @property
    def output_len(self) -> int:
        """Number of tokens of all samples."""
        return sum(len(sample.output_ids) for sample in self.samples)

    @property
    def need(self) -> GroupNeed:
        request = self.request
        return GroupNeed(len(request.prompt_ids), request.stopping.max_tokens, request.sampling.width)

    def remaining_s(self) -> float:
        """Returns the seconds that are left for a call. Raises DeadlineExceeded if no time is left."""
        left = self.arrived + self.request.timeout_s - time.monotonic() - MARGIN_S
        if left <= 0:
            raise too_late(self.request.timeout_s)
        return left

    def took(self, **added_ns: int) -> None:
        """Adds durations in nanoseconds to the request's times `queue_ns`, `prefill_ns`, `hand_over_ns` and
        `decode_ns`.
        """
        self.times = replace(self.times, **{name: getattr(self.times, name) + ns for name, ns in added_ns.items()})

    def summary(self) -> Summary:
        sources = replace(self.sources or PromptSources(), transferred=self.transferred)
        prompt_len = len(self.request.prompt_ids)
        return Summary(prompt_len, self.output_len, sources, self.handed_over, self.times, self.attempts)

    def blocks_to_come_back(self, rules: KvRules) -> int:
        """Returns the number of blocks that the group needs to continue. A beam search starts over, so it needs enough
        blocks to reach its end.
        """
        need = self.need
        if self.is_beam_search:
            return need.blocks(rules)
        lengths = [need.prompt_len + len(sample.output_ids) + 1 for sample in self.open_samples]
        return most_held(rules, need.prompt_len, lengths)

    def leaves(self, delta: Delta, now: float) -> None:
        """Counts the tokens of a delta that is being sent and measures its latency. Adds the prompt's log-probabilities
        and sources to the request's first delta, unless that delta has an embedding.
        """
        sample, count, metrics = self.samples[delta.index], len(delta.token_ids), self.metrics
        sample.delta = None
        if sample.left_at:
            metrics.next_tokens(count, now - sample.left_at)
            delta.is_plain = delta.finish_reason is None and not delta.logprobs
        else:
            delta.is_first = True
            self._account_first(delta, now)
        self.left_at = sample.left_at = now

    def _account_first(self, delta: Delta, now: float) -> None:
        """Counts the tokens of a sample's first delta, which have no inter-token latency. For the request's first
        delta, also records the time to first token and counts the prompt. An embedding has no tokens to count.
        """
        count, metrics = len(delta.token_ids), self.metrics
        if delta.embedding:
            metrics.prompt_done(self.summary())
            return
        if not self.left_at:
            self.explanation.wrote_first()
            delta.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, ()
            delta.sources = self.sources
            metrics.first_token(now - self.arrived, self.summary())
            count -= 1
        metrics.tokens(count)

    def sum_up(self) -> None:
        """Adds the request's summary to the last delta. Must be called only when every sample has ended."""
        last = self.outlet.pending[-1]
        assert last.finish_reason is not None
        last.summary, self.outcome = self.summary(), last.finish_reason.value

    # --- input: it stays pending in the outlet until the outlet is flushed

    def accept_token(self, sample_index: int, output_index: int, token_id: int) -> bool:
        """Accepts a token with which the worker does not end the sample. Returns True if the token completes a stop
        string, which ends the sample. Raises WorkerLost if there is no such sample, or if an earlier token is missing.
        """
        try:
            sample = self.samples[sample_index]
        except IndexError:
            raise internal("decode") from None
        if sample.finish_reason is not None:
            return False
        sample.accept_token(self.outlet, output_index, token_id)
        return sample.finish_reason is not None and self._note_end(sample)

    def accept(self, output: decode_pb2.SequenceOutput) -> bool:
        """Accepts decode's output for one sample. Returns True if a stop string has ended the sample and the worker has
        not. Raises WorkerLost if there is no such sample, if earlier tokens are missing, or if the output ends the
        sample without a new token.
        """
        if output.sample_index >= len(self.samples):
            raise internal("decode")
        sample = self.samples[output.sample_index]
        if sample.finish_reason is not None:
            return False
        finish = convert.finish_reason_from_pb(output.finish_reason)
        sample.accept(self.outlet, output.first_index, output.token_ids, output.logprobs, finish)
        if finish is not None and output.HasField("beam_score"):
            self.outlet.pending[-1].beam_score = output.beam_score
        return self._note_end(sample) and finish is None

    def accept_first(self, done: prefill_pb2.PrefillDone) -> list[Sample]:
        """Accepts the token that prefill drew for each branch, or the embedding. Returns the samples with which the
        ticket continues. Some of them may already have ended, by a stop string or by a stopping parameter that prefill
        did not apply.

        Raises WorkerLost for an answer that does not match the request.
        """
        if self.request.pooling is not None:
            return self._accept_embedding(done)
        going, sent = [], [] if self.is_beam_search else self.open_samples
        if [token.sample_index for token in done.tokens] != [sample.index for sample in sent]:
            raise internal("prefill")
        for sample, token in zip(sent, done.tokens, strict=True):
            given = convert.finish_reason_from_pb(token.finish_reason)
            finish = self.request.stopping.finish_reason(token.token_id, len(sample.output_ids) + 1) or given
            details = [token.logprob] if token.HasField("logprob") else []
            sample.accept(self.outlet, len(sample.output_ids), [token.token_id], details, finish)
            self._note_end(sample)
            if given is None:
                going.append(sample)
        branches = 1 if self.is_beam_search else len(going)
        if len(done.ticket.branches) != branches or self.is_beam_search != done.HasField("beam_candidates"):
            raise internal("prefill")
        return self.open_samples if self.is_beam_search else going

    def _accept_embedding(self, done: prefill_pb2.PrefillDone) -> list[Sample]:
        if not done.embedding or done.tokens or done.HasField("ticket"):
            raise internal("prefill")
        self.samples[0].take_embedding(self.outlet, done.embedding)
        self._note_end(self.samples[0])
        return []

    def _note_end(self, sample: Sample) -> bool:
        """Returns whether the sample has ended, and counts its end. Must be called only once after the end."""
        ended = sample.finish_reason is not None
        self.num_open -= ended
        return ended

    # --- output: messages for workers

    def prefill_request(self) -> prefill_pb2.PrefillRequest:
        request = self.request
        return prefill_pb2.PrefillRequest(
            request_id=request.request_id,
            attempt=self.attempts,
            cache_salt=request.salt,
            cache_quota=self.quota,
            public_tokens=request.public_tokens,
            prompt_token_ids=request.prompt_ids,
            branches=self._branches(self.open_samples),
            sampling=_sampling(request.sampling, with_prompt=self.sources is None),
            stopping=convert.stopping_to_pb(request.stopping),
            priority=self.rank,
            pooling=None if request.pooling is None else convert.POOLINGS[request.pooling],
            adapter=bytes.fromhex(request.adapter_digest),
        )

    def submit_request(self, done: prefill_pb2.PrefillDone, going: list[Sample]) -> decode_pb2.Submit:
        """Returns the message that submits a group to decode after its prefill. Raises DeadlineExceeded if no time is
        left.
        """
        request = self.request
        return decode_pb2.Submit(
            request_id=request.request_id,
            attempt=self.attempts - 1,
            ticket=done.ticket,
            cache_salt=request.salt,
            cache_quota=self.quota,
            public_tokens=request.public_tokens,
            prompt_token_ids=request.prompt_ids,
            branches=self._branches(going),
            sampling=_sampling(request.sampling, with_prompt=False),
            stopping=convert.stopping_to_pb(request.stopping),
            priority=self.rank,
            timeout_ms=max(1, int(self.remaining_s() * 1000)),
            beam_candidates=done.beam_candidates if self.is_beam_search else None,
            adapter=bytes.fromhex(request.adapter_digest),
        )

    @property
    def quota(self) -> types_pb.CacheQuota | None:
        quota = self.request.cache_quota
        return None if quota is None else convert.quota_to_pb(quota)

    def _branches(self, samples: list[Sample]) -> list[types_pb.Branch]:
        branches = [Branch()] if self.is_beam_search else [sample.branch for sample in samples]
        return [convert.branch_to_pb(branch) for branch in branches]


def _sampling(params: SamplingParams, *, with_prompt: bool) -> types_pb.SamplingParams:
    """Returns the sampling parameters for a worker, without `prompt_logprobs` unless `with_prompt` is set."""
    message = convert.sampling_to_pb(params)
    if not with_prompt:
        message.ClearField("prompt_logprobs")
    return message
