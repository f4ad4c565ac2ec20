"""One attempt at a request: prefill on one worker, hand-over, decode on another.

Decode pushes its tokens: the session with the worker calls `_Decoding`, which adds them to the request's state and
flushes its outlet. The request's own task waits only until every sample has ended, or until something ends the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass

from common import convert
from common.errors import Unavailable
from common.types import WorkerRecord
from gateway.admission.gate import Gate, Place
from gateway.fleet.decode_client import DecodeSession, SubmittedGroup
from gateway.fleet.decode_place import DecodePlace
from gateway.fleet.pending_ticket import PendingTicket
from gateway.fleet.routing import Route
from gateway.fleet.worker_lost import WorkerLost, incarnation, rejected, too_late
from gateway.fleet.workers import Workers
from gateway.metrics import Metrics
from gateway.request.head_start import HeadStart
from gateway.request.isolation import Isolation, IsolationTicket
from gateway.request.sample import Sample
from gateway.request.state import RequestState, tokens_of
from protos.v1 import decode_pb2, prefill_pb2
from protos.v1 import types_pb2 as types_pb

logger = logging.getLogger("requests")
WAIT_FOR_WORKERS_S = 0.05
NO_PAIR = "no pair of prefill and decode workers is ready"


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """The result of an attempt's prefill, which decode continues."""

    route: Route
    done: prefill_pb2.PrefillDone
    isolation: IsolationTicket


class Attempts:
    """The runner of attempts, each of which is a prefill, a hand-over and a decode of a request."""

    def __init__(
        self, workers: Workers, gate: Gate, isolation: Isolation, metrics: Metrics, *, recover_s: float
    ) -> None:
        """`recover_s` is the time for which a request waits for a worker that can accept it."""
        self._workers = workers
        self._gate = gate
        self._isolation = isolation
        self._metrics = metrics
        self._recover_s = recover_s

    async def run(self, state: RequestState, place: Place) -> None:
        """Prefills, hands over and decodes until every sample has ended.

        Raises WorkerLost if a further attempt may follow, and a LooseleafError if not.
        """
        state.decoded_from = state.output_len
        with ExitStack() as held:
            start, state.head_start = state.head_start, None
            if start is None:
                prefilled = await self._prefill(state, place, held)
            else:
                prefilled = await self._take_over(state, start, held)
            ticket = held.enter_context(PendingTicket.of(self._workers, prefilled.done))
            going = state.accept_first(prefilled.done)
            state.decoded_from = state.output_len
            if state.num_open:
                await self._decode(state, prefilled, going, ticket)
            else:
                state.sum_up()

    async def prefill(self, state: RequestState, place: Place) -> HeadStart:
        """Runs only the prefill, for a later call that continues it. Raises the errors of `run`."""
        with ExitStack() as held:
            prefilled = await self._prefill(state, place, held)
        return HeadStart(state.request, place, prefilled.route, prefilled.done)

    # --- the first half

    async def _take_over(self, state: RequestState, start: HeadStart, held: ExitStack) -> _Prefilled:
        """Continues from a prefill that another call has run. That prefill counts as an attempt of this request."""
        done = start.done
        with PendingTicket.of(self._workers, done) as pending:
            isolation = await self._isolation.enter(state.digest, incarnation(start.route.prefill))
            pending.ticket = None
        held.enter_context(isolation)
        isolation.prefilled(is_heard_of=True)
        state.attempts += 1
        _account_prefill(state, done)
        return _Prefilled(start.route, done, isolation)

    async def _prefill(self, state: RequestState, place: Place, held: ExitStack) -> _Prefilled:
        """Prefills the prompt. `held` receives the permission to use a worker, which a suspect keeps into decode."""
        try:
            async with asyncio.timeout(state.remaining_s()):
                route, isolation = await self._enter_prefill(state)
                held.enter_context(isolation)
                done = await self._call_prefill(state, route.prefill)
                if state.attempts == 1:
                    self._gate.waited(place, state.times.queue_ns / 1e9)
        except TimeoutError:
            raise too_late(state.request.timeout_s) from None
        finally:
            self._workers.keep_promise(place)
        isolation.prefilled(is_heard_of=state.is_heard_of)
        return _Prefilled(route, done, isolation)

    async def _enter_prefill(self, state: RequestState) -> tuple[Route, IsolationTicket]:
        """Waits until the request may be sent to a prefill worker. Returns its route and the permission to use it."""
        route = await self._pick_prefill(state)
        isolation = await self._isolation.enter(state.digest, incarnation(route.prefill))
        if self._workers.failed(route.prefill):  # while this request waited for its turn
            isolation.leave()
            route = await self._pick_prefill(state)
            isolation = await self._isolation.enter(state.digest, incarnation(route.prefill))
        return route, isolation

    async def _pick_prefill(self, state: RequestState) -> Route:
        """Picks a prefill worker that has a reachable partner. Raises Unavailable if there is none for `recover_s`, not
        counting the time in which the launcher restarts a worker.
        """
        request, need, began = state.request, state.need, time.monotonic()
        while True:
            route = await self._workers.pick_prefill(request, need)
            if route is not None:
                return route
            if self._workers.are_restarting:
                began = time.monotonic()  # the new worker needs some time to join after it has loaded
            why = self._workers.objection(need, request.adapter_digest)
            waited_s = time.monotonic() - began if why is not None else self._workers.missing_for()
            if waited_s > self._recover_s:
                raise Unavailable(why or NO_PAIR, retry_after_s=1.0)
            await asyncio.sleep(min(WAIT_FOR_WORKERS_S, state.remaining_s()))

    async def _call_prefill(self, state: RequestState, worker: WorkerRecord) -> prefill_pb2.PrefillDone:
        message, again = state.prefill_request(), state.attempts > 0
        state.attempts += 1
        self._metrics.dispatched("prefill", worker.worker_id)
        began = time.monotonic()
        try:
            done = await self._workers.prefill(worker, message, state.remaining_s())
        except WorkerLost:
            state.took(prefill_ns=_since_ns(began))
            raise
        _account_prefill(state, done)
        if again:
            lengths = [len(sample.output_ids) for sample in state.open_samples]
            logger.debug("request %s continues at token %s", state.request.request_id, lengths)
        return done

    # --- the second half

    async def _decode(
        self, state: RequestState, prefilled: _Prefilled, going: list[Sample], ticket: PendingTicket
    ) -> None:
        place = self._workers.pick_decode(prefilled.route, state.need)
        if place is None:
            state.outlet.flush()
            raise WorkerLost("no_decode", counted=self._workers.ready)
        with place:
            await self._bring(state, prefilled.done, place, ticket)
            await self._continue(state, prefilled, going, place, ticket)

    async def _bring(
        self, state: RequestState, done: prefill_pb2.PrefillDone, place: DecodePlace, ticket: PendingTicket
    ) -> None:
        """Copies the blocks to the decode worker's arena, if prefill used a different one, and replaces the ticket with
        the ticket of the copies.
        """
        if done.ticket.arena_id == place.session.record.arena_id:
            return
        state.outlet.flush()  # prefill's tokens need not wait for the copy
        began = time.monotonic()
        try:
            arena_id, public_tokens = place.session.record.arena_id, state.request.public_tokens
            pulled = await ticket.move(arena_id, state.quota, public_tokens, state.remaining_s())
        finally:
            state.took(hand_over_ns=_since_ns(began))
        state.transferred += pulled.num_tokens
        self._metrics.pulled(pulled)
        done.ticket.CopyFrom(pulled.ticket)

    async def _continue(
        self, state: RequestState, prefilled: _Prefilled, going: list[Sample], place: DecodePlace, ticket: PendingTicket
    ) -> None:
        """Submits the group to decode, and waits until it has ended."""
        message, left_s = state.submit_request(prefilled.done, going), state.remaining_s()
        decoding = _Decoding(state, place.session, prefilled.isolation)
        group = decoding.submit(message, going)
        ticket.ticket = None
        self._account(state, prefilled, place.session)
        timer = asyncio.get_running_loop().call_later(left_s, group.fail, too_late(state.request.timeout_s))
        try:
            state.outlet.flush()  # decode has the ticket, so prefill's tokens may be sent
            await group.wait()
        except WorkerLost as lost:
            state.took(decode_ns=_since_ns(decoding.began))
            if lost.suspect:
                place.suspect()
            raise
        finally:
            timer.cancel()
            place.session.cancel(group)

    def _account(self, state: RequestState, prefilled: _Prefilled, session: DecodeSession) -> None:
        state.handed_over = tokens_of(prefilled.done.ticket, prefilled.route.prefill.block_size)
        self._metrics.handed_over(state.handed_over)
        self._metrics.dispatched("decode", session.record.worker_id)


class _Decoding:
    """The receiver of a group's outputs, which it adds to the request's state and writes to the request's outlet."""

    __slots__ = ("_group", "_isolation", "_session", "_some_ended", "_state", "_timings", "began")

    def __init__(self, state: RequestState, session: DecodeSession, isolation: IsolationTicket) -> None:
        self.began = time.monotonic()
        self._state = state
        self._session = session
        self._isolation: IsolationTicket | None = isolation
        self._some_ended = False
        """Whether a sample has ended since the last flush."""
        self._timings: types_pb.Timings | None = None
        """The timings that the worker reported."""

    def submit(self, message: decode_pb2.Submit, going: list[Sample]) -> SubmittedGroup:
        group = self._group = self._session.submit(message, [sample.index for sample in going], self)
        for sample in going:
            if sample.finish_reason is not None:  # by a stop string in its first token
                self._session.cancel_sample(group, sample.index)
        return group

    def take_token(self, sample: int, output_index: int, token_id: int) -> None:
        if self._state.accept_token(sample, output_index, token_id):
            self._stopped(sample)

    def take(self, output: decode_pb2.SequenceOutput) -> None:
        if output.rejection:
            raise rejected(output.rejection, self._state.request.timeout_s)
        if self._state.accept(output):
            self._stopped(output.sample_index)
        elif output.finish_reason:
            self._some_ended, self._timings = True, output.timings

    def flush(self) -> None:
        if self._isolation is not None:  # the first step with this group is over
            self._isolation.leave()
            self._isolation = None
        if self._some_ended:
            self._flush_end()
        else:
            self._state.outlet.flush()

    def _flush_end(self) -> None:
        self._some_ended, state = False, self._state
        if not state.num_open:
            self._add_decode_time()
            state.sum_up()
            self._group.end()
        state.outlet.flush(at_once=True)

    def _stopped(self, sample: int) -> None:
        """Tells the worker that a stop string ended a sample. The worker does not know stop strings."""
        self._some_ended = True
        self._session.cancel_sample(self._group, sample)

    def _add_decode_time(self) -> None:
        """Adds the decode time that the worker reported, or the gateway's measurement if the worker reported none
        (after a stop string).
        """
        timings = self._timings
        if timings is not None and timings.decode_ns:
            self._state.took(hand_over_ns=timings.hand_over_ns, decode_ns=timings.decode_ns)
        else:
            self._state.took(decode_ns=_since_ns(self.began))


def _account_prefill(state: RequestState, done: prefill_pb2.PrefillDone) -> None:
    state.took(queue_ns=done.timings.queue_ns, prefill_ns=done.timings.prefill_ns)
    if state.sources is None:
        state.sources = convert.sources_from_pb(done.sources)
        state.prompt_logprobs = done.prompt_logprobs


def _since_ns(began: float) -> int:
    return int((time.monotonic() - began) * 1e9)
