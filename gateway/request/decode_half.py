"""The decode half of an attempt: hand the ticket over, then put out what comes, until the group's last sample ends.

A stop string that is found here ends one sample, which is then cancelled at the worker; the others go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from common.errors import LooseleafError
from common.types import WorkerRecord
from gateway.admission.gate import Gate
from gateway.fleet.decode_client import MIN_PAUSE_S, DecodeSession, OutputStream
from gateway.fleet.lost import WorkerLost, rejected, too_late
from gateway.fleet.workers import Workers
from gateway.metrics import Metrics
from gateway.request.direct import Direct
from gateway.request.sample import Piece, Sample
from gateway.request.state import Pieces, RequestState, tokens_of
from protos.v1 import prefill_pb2
from protos.v1 import types_pb2 as types_pb

MESSAGE_COST_S = 0.00025
"""A message to a client costs the event loop up to 0.1 ms. With many streams each waits so long per stream between its
messages, and sends what has come meanwhile as one: the loop stays free for new calls (grpc.aio accepts one at a time).
At 64 streams that is 16 ms, less than a step that is worth the name.
"""
FEW_STREAMS = 16
"""Up to so many streams every step's tokens go out at once."""


@dataclass(slots=True)
class _News:
    """What one read of a worker's outputs brought."""

    pieces: Pieces = field(default_factory=dict)
    timings: types_pb.Timings | None = None
    error: Exception | None = None


@dataclass(slots=True)
class PendingTicket:
    """A ticket on its way from prefill to decode: given up unless it gets there."""

    workers: Workers
    ticket: types_pb.Ticket | None
    """None: there is none, or decode has it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ticket is not None:
            self.workers.give_up(self.ticket)


@dataclass(frozen=True, slots=True)
class HandOver:
    """What a prefill worker has left for decode."""

    prefill: WorkerRecord
    done: prefill_pb2.PrefillDone
    first: Pieces
    """Of the tokens that prefill drew; they go out once decode has the ticket."""
    ticket: PendingTicket
    going: list[Sample]
    """The samples whose tables the ticket has, in its order; of a beam search those that it will return."""


class DecodeHalf:
    """Sees groups through decode."""

    def __init__(self, workers: Workers, gate: Gate, metrics: Metrics) -> None:
        self._workers = workers
        self._gate = gate
        self._metrics = metrics

    async def run(self, state: RequestState, hand_over: HandOver) -> AsyncGenerator[Piece, None]:
        """Pieces of all samples; a message brings at most one of each. Errors: WorkerLost, any LooseleafError."""
        # The message may be too late: made before a place is taken.
        message, left_s = state.submit_request(hand_over.done, hand_over.going), state.remaining_s()
        place = self._workers.pick_decode(hand_over.prefill, state.need)
        if place is None:
            for piece in hand_over.first.values():
                yield piece
            raise WorkerLost("no_decode")
        began, session = time.monotonic(), place.session
        stream = session.submit(message, [sample.index for sample in hand_over.going])
        hand_over.ticket.ticket = None
        self._account(state, hand_over, session)
        timer = asyncio.get_running_loop().call_later(left_s, stream.fail, too_late(state.request.timeout_s))
        try:
            for sample in hand_over.going:
                if sample.finish_reason is not None:  # by a stop string in its first token
                    session.cancel_sample(stream, sample.index)
            for piece in hand_over.first.values():
                yield piece
            while state.num_open:
                if stream.short_way is None:
                    await self._pace(state)
                news = await _next(state, session, stream)
                state.entry.leave()  # the first step with it is over
                if stream.short_way is None and state.direct is not None:
                    stream.short_way = _ShortWay(state, state.direct, self._pause_s, self._metrics)
                if not state.num_open:
                    _add_decode_time(state, news.timings, began)
                    list(news.pieces.values())[-1].summary = state.summary()
                for piece in news.pieces.values():
                    if piece.token_ids:
                        yield piece
                if news.error is not None:
                    raise news.error
        except WorkerLost as lost:
            _add_decode_time(state, None, began)
            if lost.suspect:
                place.suspect()
            raise
        finally:
            timer.cancel()
            session.cancel(stream)
            place.release()

    def _account(self, state: RequestState, hand_over: HandOver, session: DecodeSession) -> None:
        state.handed_over = tokens_of(hand_over.done.ticket, hand_over.prefill.block_size)
        self._metrics.handed_over(state.handed_over)
        self._metrics.dispatched("decode", session.record.worker_id)

    async def _pace(self, state: RequestState) -> None:
        """Hold the next message back while there are many streams and this one has just sent."""
        if (pause := self._pause_s(state.emitted_at)) > MIN_PAUSE_S:
            await asyncio.sleep(pause)

    def _pause_s(self, emitted_at: float) -> float:
        """How long the next message after one of this time waits; nothing if it is not positive."""
        inside = self._gate.inside
        return emitted_at + inside * MESSAGE_COST_S - time.monotonic() if inside > FEW_STREAMS else 0.0


class _ShortWay:
    """Puts out the next tokens of a request's samples where nothing else has to be decided: what most outputs are."""

    __slots__ = ("_direct", "_life", "_metrics", "_pause_after")

    def __init__(
        self, state: RequestState, direct: Direct[Any], pause_after: Callable[[float], float], metrics: Metrics
    ) -> None:
        self._life = state
        self._direct = direct
        self._pause_after = pause_after
        self._metrics = metrics

    def pause_s(self, sample: int) -> float:
        samples = self._life.samples
        return self._pause_after(samples[sample].emitted_at) if sample < len(samples) else 0.0

    def take(self, sample: int, first_index: int, token_ids: Sequence[int]) -> bool:
        state, direct = self._life, self._direct
        if sample >= len(state.samples) or not direct.ready:
            return False
        its = state.samples[sample]
        if not its.emitted_at or (text := its.accept_plain(first_index, token_ids)) is None:
            return False
        now = time.monotonic()
        self._metrics.next_tokens(len(token_ids), now - its.emitted_at)
        state.emitted_at = its.emitted_at = now
        direct.send(sample, token_ids, text)
        return True


async def _next(state: RequestState, session: DecodeSession, stream: OutputStream) -> _News:
    """All that has come since the last pieces, up to the last sample's end or what went wrong."""
    news = _News()
    try:
        for output in await stream.get():
            if not state.num_open:
                break
            if output.rejection:
                raise rejected(output.rejection, state.request.timeout_s)
            if state.accept(news.pieces, output):
                session.cancel_sample(stream, output.sample_index)
            elif output.finish_reason:
                news.timings = output.timings
    except (WorkerLost, LooseleafError) as error:
        news.error = error  # the tokens that came before it still go out
    return news


def _add_decode_time(state: RequestState, timings: types_pb.Timings | None, began: float) -> None:
    """The worker's own account, or the gateway's where the worker gave none (a stop string, a loss)."""
    if timings is not None and timings.decode_ns:
        state.took(hand_over_ns=timings.hand_over_ns, decode_ns=timings.decode_ns)
    else:
        state.took(decode_ns=int((time.monotonic() - began) * 1e9))
