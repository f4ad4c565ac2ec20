"""The life of one request: gate, prefill, ticket, decode, and again from the start when a worker is lost.

The gateway owns what the client sees, so that a lost worker is a pause: prompt and accepted tokens are prefilled again,
where all but the tail is a prefix hit, and the next token has the next index. Every wait is bounded by the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from tokenizers import Tokenizer

from common import convert
from common.errors import LooseleafError, Unavailable
from common.types import PromptSources, SamplingParams, Timings, WorkerRecord
from gateway.admission import Gate, Place
from gateway.assemble import Piece, Sample, Summary
from gateway.lost import WorkerLost, internal, rejected, too_late
from gateway.metrics import Metrics
from gateway.poison import PoisonList, digest_of
from gateway.sessions import OutputStream
from gateway.validate import ResolvedRequest
from gateway.workers import Workers
from protos.v1 import decode_pb2, prefill_pb2
from protos.v1 import types_pb2 as types_pb

logger = logging.getLogger("requests")
MARGIN_S = 0.02
"""What a hop keeps of the time left for its own answer."""
WAIT_FOR_WORKERS_S = 0.05
MESSAGE_COST_S = 0.0005
"""A message to a client costs the event loop about 0.2 ms. With many streams each waits so long per stream between its
messages, and sends what has come meanwhile as one: the loop stays free for new calls (grpc.aio accepts one at a time).
"""
FEW_STREAMS = 16
"""Up to so many streams every step's tokens go out at once."""


@dataclass(slots=True)
class _News:
    """What one read of a worker's outputs brought."""

    piece: Piece
    timings: types_pb.Timings | None = None
    error: Exception | None = None


@dataclass(slots=True)
class _Life:
    """Everything that outlives an attempt."""

    request: ResolvedRequest
    sample: Sample
    arrived: float
    deadline: float
    digest: bytes = b""
    attempts: int = 0
    losses: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    hand_over_ns: int = 0
    decode_ns: int = 0
    sources: PromptSources | None = None
    handed_over: int = 0
    emitted_at: float = 0.0

    def remaining_s(self) -> float:
        left = self.deadline - time.monotonic() - MARGIN_S
        if left <= 0:
            raise too_late(self.request.timeout_s)
        return left

    def summary(self) -> Summary:
        timings = Timings(self.queue_ns, self.prefill_ns, self.hand_over_ns, self.decode_ns)
        prompt_len, output_len = len(self.request.prompt_ids), len(self.sample.output_ids)
        return Summary(
            prompt_len, output_len, self.sources or PromptSources(), self.handed_over, timings, self.attempts
        )


class RequestRunner:
    """Runs requests that have been admitted and resolved."""

    def __init__(
        self,
        workers: Workers,
        gate: Gate,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        max_attempts: int,
        recover_s: float,
    ) -> None:
        self._workers = workers
        self._gate = gate
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._recover_s = recover_s
        self._poison = PoisonList()

    async def generate(self, request: ResolvedRequest) -> AsyncGenerator[Piece, None]:
        """Pieces of the continuation; the last has finish_reason and summary.

        Closing this (or cancelling its reader) cancels the work. Errors: any LooseleafError.
        """
        now = time.monotonic()
        digest = digest_of(request.prompt_ids, request.salt)
        life = _Life(request, Sample(request, self._tokenizer), now, now + request.timeout_s, digest)
        outcome = "abort"
        try:
            place = await self._enter(life)
            try:
                async with aclosing(self._attempts(life)) as pieces:
                    async for piece in pieces:
                        self._count(life, piece)
                        if piece.finish_reason is not None:
                            outcome = piece.finish_reason.value
                            self._poison.completed(life.digest)
                        yield piece
            finally:
                self._gate.leave(place)
        except LooseleafError:
            outcome = "error"
            raise
        finally:
            self._metrics.ended(outcome, time.monotonic() - life.arrived, life.summary())

    async def _enter(self, life: _Life) -> Place:
        """Wait for a place with the workers; at once refused if there are none, or if it kills them."""
        self._poison.check(life.digest)
        if not self._workers.ready:
            raise Unavailable("no pair of prefill and decode workers is ready", retry_after_s=1.0)
        try:
            async with asyncio.timeout(life.remaining_s()):
                request = life.request
                place = await self._gate.enter(request.priority, request.tenant, request.sampling.width, request.cost)
        except TimeoutError:
            raise too_late(life.request.timeout_s) from None
        life.queue_ns += _ns(time.monotonic() - life.arrived)
        return place

    def _count(self, life: _Life, piece: Piece) -> None:
        if not piece.token_ids:
            return
        now = time.monotonic()
        if life.emitted_at == 0.0:
            self._metrics.first_token(now - life.arrived, life.summary())
            self._metrics.next_tokens(len(piece.token_ids) - 1, 0.0)
        else:
            self._metrics.next_tokens(len(piece.token_ids), now - life.emitted_at)
        life.emitted_at = now

    async def _attempts(self, life: _Life) -> AsyncGenerator[Piece, None]:
        while True:
            try:
                async with aclosing(self._attempt(life)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except WorkerLost as lost:
                self._account_loss(life, lost)
            await asyncio.sleep(min(0.02 * life.losses, life.remaining_s()))

    def _account_loss(self, life: _Life, lost: WorkerLost) -> None:
        self._metrics.retried(lost.reason)
        life.losses += lost.counted
        logger.info("request %s is prefilled again: %s", life.request.request_id, lost.reason)
        if lost.death is not None:
            self._poison.died(life.digest, lost.death)
            self._poison.check(life.digest)
        if life.losses >= self._max_attempts:
            raise lost.final

    async def _attempt(self, life: _Life) -> AsyncGenerator[Piece, None]:
        """One prefill and one decode."""
        prefill = await self._pick_prefill(life)
        done = await self._prefill(life, prefill)
        piece = Piece(prompt_logprobs=done.prompt_logprobs)
        token = done.tokens[0]
        finish = convert.finish_reason_from_pb(token.finish_reason)
        details = [token.logprob] if token.HasField("logprob") else []
        life.sample.accept(piece, len(life.sample.output_ids), [token.token_id], details, finish)
        if life.sample.finish_reason is not None:
            piece.summary = life.summary()
            yield piece
            return
        async with aclosing(self._decode(life, prefill, done.ticket, piece)) as pieces:
            async for piece in pieces:
                yield piece

    # --- prefill

    async def _pick_prefill(self, life: _Life) -> WorkerRecord:
        """A prefill worker with a reachable partner; waits for one if workers were lost a moment ago."""
        while True:
            worker = await self._workers.pick_prefill(life.request.prompt_ids, life.request.salt)
            if worker is not None:
                return worker
            if self._workers.missing_for() > self._recover_s:
                raise Unavailable("no pair of prefill and decode workers is ready", retry_after_s=1.0)
            await asyncio.sleep(min(WAIT_FOR_WORKERS_S, life.remaining_s()))

    async def _prefill(self, life: _Life, worker: WorkerRecord) -> prefill_pb2.PrefillDone:
        request, again = life.request, life.attempts > 0
        message = prefill_pb2.PrefillRequest(
            request_id=request.request_id,
            attempt=life.attempts,
            cache_salt=request.salt,
            prompt_token_ids=request.prompt_ids,
            branches=[convert.branch_to_pb(life.sample.branch)],
            sampling=_sampling(request.sampling, with_prompt=life.sources is None),
            stopping=convert.stopping_to_pb(request.stopping),
            priority=request.priority,
        )
        life.attempts += 1
        self._metrics.dispatched("prefill", worker.worker_id)
        began = time.monotonic()
        try:
            done = await self._workers.prefill(worker, message, life.remaining_s())
        except WorkerLost:
            life.prefill_ns += _ns(time.monotonic() - began)
            raise
        if len(done.tokens) != 1:
            raise internal("prefill")
        life.queue_ns += done.timings.queue_ns
        life.prefill_ns += done.timings.prefill_ns
        if life.sources is None:
            life.sources = convert.sources_from_pb(done.sources)
        if again:
            logger.info("request %s goes on at token %d", request.request_id, len(life.sample.output_ids))
        return done

    # --- decode

    async def _decode(
        self, life: _Life, prefill: WorkerRecord, ticket: types_pb.Ticket, first: Piece
    ) -> AsyncGenerator[Piece, None]:
        """Hand the ticket over, then put out `first` (the first token), then what decode sends."""
        message, left_s = self._submit(life, ticket), life.remaining_s()  # may be too late: before a place is taken
        place = self._workers.pick_decode(prefill)
        if place is None:
            yield first
            raise WorkerLost("no_decode")
        began = time.monotonic()
        stream = place.session.submit(message)
        life.handed_over = ticket.branches[0].num_tokens
        self._metrics.handed_over(life.handed_over)
        self._metrics.dispatched("decode", place.session.record.worker_id)
        timer = asyncio.get_running_loop().call_later(left_s, stream.fail, too_late(life.request.timeout_s))
        try:
            yield first
            while life.sample.finish_reason is None:
                await self._pace(life)
                news = await self._next(life, stream)
                if news.piece.finish_reason is not None:
                    _add_decode_time(life, news.timings, began)
                    news.piece.summary = life.summary()
                if news.piece.token_ids:
                    yield news.piece
                if news.error is not None:
                    raise news.error
        except WorkerLost as lost:
            _add_decode_time(life, None, began)
            if lost.suspect:
                place.suspect()
            raise
        finally:
            timer.cancel()
            place.session.cancel(stream)
            place.release()

    async def _pace(self, life: _Life) -> None:
        """Hold the next message back while there are many streams and this one has just sent."""
        if self._gate.inside > FEW_STREAMS:
            pause = life.emitted_at + self._gate.inside * MESSAGE_COST_S - time.monotonic()
            if pause > 0.001:
                await asyncio.sleep(pause)

    async def _next(self, life: _Life, stream: OutputStream) -> _News:
        """All that has come since the last piece, up to the sample's end or what went wrong."""
        news = _News(Piece())
        try:
            for output in await stream.get():
                if life.sample.finish_reason is not None:
                    break
                if output.rejection:
                    raise rejected(output.rejection, life.request.timeout_s)
                finish = convert.finish_reason_from_pb(output.finish_reason)
                life.sample.accept(news.piece, output.first_index, output.token_ids, output.logprobs, finish)
                if finish is not None:
                    news.timings = output.timings
        except (WorkerLost, LooseleafError) as error:
            news.error = error  # the tokens that came before it still go out
        return news

    def _submit(self, life: _Life, ticket: types_pb.Ticket) -> decode_pb2.Submit:
        request = life.request
        return decode_pb2.Submit(
            request_id=request.request_id,
            attempt=life.attempts - 1,
            ticket=ticket,
            cache_salt=request.salt,
            prompt_token_ids=request.prompt_ids,
            branches=[convert.branch_to_pb(life.sample.branch)],
            sampling=_sampling(request.sampling, with_prompt=False),
            stopping=convert.stopping_to_pb(request.stopping),
            priority=request.priority,
            timeout_ms=max(1, int(life.remaining_s() * 1000)),
        )


def _sampling(params: SamplingParams, *, with_prompt: bool) -> types_pb.SamplingParams:
    """For a worker. Prompt log-probabilities are asked for once: they keep a prompt from using its cached prefix."""
    message = convert.sampling_to_pb(params)
    if not with_prompt:
        message.ClearField("prompt_logprobs")
    return message


def _add_decode_time(life: _Life, timings: types_pb.Timings | None, began: float) -> None:
    """The worker's own account, or the gateway's where the worker gave none (a stop string, a loss)."""
    if timings is not None and timings.decode_ns:
        life.hand_over_ns += timings.hand_over_ns
        life.decode_ns += timings.decode_ns
    else:
        life.decode_ns += _ns(time.monotonic() - began)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
