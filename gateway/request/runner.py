"""The life of one request: gate, prefill, ticket, decode, and again from the start when a worker is lost.

The gateway owns what the client sees, so that a lost worker is a pause: prompt and accepted tokens of every sample that
has not ended are prefilled again, where all but the tail is a prefix hit, and the next token has the next index. A beam
search starts over. Every wait is bounded by the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from tokenizers import Tokenizer

from common import convert
from common.errors import LooseleafError, Unavailable
from common.telemetry import Burst
from common.types import WorkerRecord
from gateway.admission.gate import Gate, Place
from gateway.fleet.lost import WorkerLost, incarnation, too_late
from gateway.fleet.workers import Workers
from gateway.intake.validate import ResolvedRequest
from gateway.metrics import Metrics
from gateway.request.decode_half import DecodeHalf, HandOver, PendingTicket
from gateway.request.detokenize import Detokenizers
from gateway.request.direct import Direct
from gateway.request.isolation import Isolation, digest_of
from gateway.request.sample import Piece
from gateway.request.state import Pieces, RequestState
from protos.v1 import prefill_pb2

logger = logging.getLogger("requests")
WAIT_FOR_WORKERS_S = 0.05
NO_PAIR = "no pair of prefill and decode workers is ready"
PROBATION_S = 0.5
"""Others wait no longer for the first step of decode with a suspect."""


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
        used: Callable[[str, int], None] = lambda tenant, num_tokens: None,
    ) -> None:
        """`used` is told of the tokens that each request of a tenant has come to."""
        self._workers = workers
        self._gate = gate
        self._detokenizers = Detokenizers(tokenizer)
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._recover_s = recover_s
        self._used = used
        self._isolation = Isolation()
        self._decode = DecodeHalf(workers, gate, metrics)
        self._again = Burst(_tell_again)

    async def generate(
        self, request: ResolvedRequest, direct: Direct[Any] | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of all samples; a sample's last has finish_reason, the request's last has summary too. While the
        reader waits for the next piece, having written all others by `direct`, tokens may go out by `direct` instead.

        Closing this (or cancelling its reader) cancels the work. Errors: any LooseleafError.
        """
        state = RequestState.begin(request, self._detokenizers, digest_of(request.prompt_ids, request.salt), direct)
        outcome = "abort"
        try:
            place = await self._enter(state)
            try:
                async with aclosing(self._attempts(state, place)) as pieces:
                    async for piece in pieces:
                        self._note(state, piece)
                        if piece.summary is not None:
                            assert piece.finish_reason is not None
                            outcome = piece.finish_reason.value
                            self._isolation.survived(state.digest)
                        yield piece
            finally:
                self._workers.keep_promise(place)
                self._gate.leave(place)
        except LooseleafError:
            outcome = "error"
            raise
        finally:
            summary = state.summary()
            self._metrics.ended(outcome, time.monotonic() - state.arrived, summary)
            if summary.attempts:
                self._used(request.tenant, summary.prompt_tokens + summary.completion_tokens)

    async def _enter(self, state: RequestState) -> Place:
        """Wait for a place with the workers; refused at once if it kills them, or if there have been none for longer
        than a successor takes to come."""
        self._isolation.check(state.digest)
        if self._workers.missing_for() > self._recover_s:
            raise Unavailable(NO_PAIR, retry_after_s=1.0)
        request = state.request
        try:
            async with asyncio.timeout(state.remaining_s()):
                place = await self._gate.enter(request.priority, request.tenant, request.sampling.width, request.cost)
        except TimeoutError:
            raise too_late(request.timeout_s) from None
        state.rank = place.rank
        state.took(queue_ns=_since_ns(state.arrived))
        return place

    def _note(self, state: RequestState, piece: Piece) -> None:
        """A piece leaves: count its tokens and times; the first of all brings the prompt's log-probabilities."""
        if state.prompt_logprobs:
            piece.prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, ()
        if not piece.token_ids:
            return
        now, count, sample = time.monotonic(), len(piece.token_ids), state.samples[piece.index]
        if state.emitted_at == 0.0:
            self._metrics.first_token(now - state.arrived, state.summary())
            count -= 1
        if state.is_beam_search or (state.emitted_at and not sample.emitted_at):
            self._metrics.tokens(count)  # there is no time between these tokens
        else:
            self._metrics.next_tokens(count, now - (sample.emitted_at or now))
        state.emitted_at = sample.emitted_at = now

    async def _attempts(self, state: RequestState, place: Place) -> AsyncGenerator[Piece, None]:
        while True:
            try:
                async with aclosing(self._attempt(state, place)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except WorkerLost as lost:
                self._account_loss(state, lost)
                given_back = lost.given_back
            finally:
                state.entry.leave()
            if given_back:
                await self._come_back(state, place)
            else:
                await asyncio.sleep(min(0.02 * state.losses, state.remaining_s()))

    def _account_loss(self, state: RequestState, lost: WorkerLost) -> None:
        self._metrics.retried(lost.reason)
        state.losses += lost.counted
        logger.debug("request %s is prefilled again: %s", state.request.request_id, lost.reason)
        self._again.note(lost.reason)
        if state.output_len > state.decoded_from:
            self._isolation.survived(state.digest)
        if lost.death is not None:
            self._isolation.died(state.digest, lost.death)
            self._isolation.check(state.digest)
        if state.losses >= self._max_attempts:
            raise lost.final

    async def _come_back(self, state: RequestState, place: Place) -> None:
        """Wait until there are blocks for a group that decode gave back; it is ahead of everything new."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(state.remaining_s()):
                await self._gate.come_back(place, lambda: self._workers.promise(place, state.blocks_to_come_back))
        except TimeoutError:
            raise too_late(state.request.timeout_s) from None
        state.took(queue_ns=_since_ns(began))

    async def _attempt(self, state: RequestState, place: Place) -> AsyncGenerator[Piece, None]:
        """One prefill and one decode."""
        state.decoded_from = state.output_len
        try:
            async with asyncio.timeout(state.remaining_s()):
                prefill = await self._enter_prefill(state)
                done = await self._prefill(state, prefill)
                if state.attempts == 1:
                    self._gate.waited(place, state.times.queue_ns / 1e9)
        except TimeoutError:
            raise too_late(state.request.timeout_s) from None
        finally:
            self._workers.keep_promise(place)
        with PendingTicket(self._workers, done.ticket if done.HasField("ticket") else None) as ticket:
            first: Pieces = {}
            going = state.accept_first(first, done)
            state.decoded_from = state.output_len
            if not state.num_open:
                list(first.values())[-1].summary = state.summary()
                for piece in first.values():
                    yield piece
                return
            async with aclosing(self._decode.run(state, HandOver(prefill, done, first, ticket, going))) as pieces:
                async for piece in pieces:
                    yield piece

    async def _enter_prefill(self, state: RequestState) -> WorkerRecord:
        """A prefill worker that the request may be sent to now."""
        worker = await self._pick_prefill(state)
        state.entry = await self._isolation.enter(state.digest, incarnation(worker))
        if self._workers.failed(worker):  # while this waited for its turn
            state.entry.leave()
            worker = await self._pick_prefill(state)
            state.entry = await self._isolation.enter(state.digest, incarnation(worker))
        return worker

    async def _pick_prefill(self, state: RequestState) -> WorkerRecord:
        """A prefill worker with a reachable partner; waits for one if workers were lost a moment ago."""
        request, need, began = state.request, state.need, time.monotonic()
        while True:
            worker = await self._workers.pick_prefill(request, need)
            if worker is not None:
                return worker
            too_small = self._workers.ready and not self._workers.holds(need)
            waited_s = time.monotonic() - began if too_small else self._workers.missing_for()
            if waited_s > self._recover_s:
                why = "no decode worker holds a group of this size" if too_small else NO_PAIR
                raise Unavailable(why, retry_after_s=1.0)
            await asyncio.sleep(min(WAIT_FOR_WORKERS_S, state.remaining_s()))

    async def _prefill(self, state: RequestState, worker: WorkerRecord) -> prefill_pb2.PrefillDone:
        message, again = state.prefill_request(), state.attempts > 0
        state.attempts += 1
        self._metrics.dispatched("prefill", worker.worker_id)
        began = time.monotonic()
        try:
            done = await self._workers.prefill(worker, message, state.remaining_s())
        except WorkerLost:
            state.took(prefill_ns=_since_ns(began))
            raise
        if state.entry.alone and not state.is_beam_search:  # nothing is heard of beams before their end
            asyncio.get_running_loop().call_later(PROBATION_S, state.entry.leave)
        else:
            state.entry.leave()
        state.took(queue_ns=done.timings.queue_ns, prefill_ns=done.timings.prefill_ns)
        if state.sources is None:
            state.sources = convert.sources_from_pb(done.sources)
            state.prompt_logprobs = done.prompt_logprobs
        if again:
            lengths = [len(sample.output_ids) for sample in state.open_samples]
            logger.debug("request %s goes on at token %s", state.request.request_id, lengths)
        return done


def _tell_again(reasons: list[str]) -> None:
    counts = ", ".join(f"{reason} {count}" for reason, count in Counter(reasons).items())
    logger.info("%d requests are prefilled again: %s", len(reasons), counts)


def _since_ns(began: float) -> int:
    return int((time.monotonic() - began) * 1e9)
