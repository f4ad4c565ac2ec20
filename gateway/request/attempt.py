"""Runs an attempt at a request: the prefill on one worker, the hand-over, and the decode on another worker.

The session with the decode worker calls `GroupReceiver`, which adds the tokens to the request's state and flushes the
request's outlet. The request's own task waits until every sample has ended, or until something ends the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from common import convert
from common.errors import Unavailable
from gateway.admission.gate import Gate, Place
from gateway.fleet.decode_client import DecodeSession
from gateway.fleet.decode_place import DecodePlace
from gateway.fleet.pending_ticket import PendingTicket, tokens_of
from gateway.fleet.routing import Route
from gateway.fleet.worker_lost import WorkerLost, incarnation, too_late
from gateway.fleet.workers import Workers
from gateway.intake.resolved_request import ResolvedRequest
from gateway.metrics import Metrics
from gateway.request.early_pulls import EarlyPulls
from gateway.request.group_receiver import GroupReceiver
from gateway.request.head_start import HeadStart
from gateway.request.isolation import Isolation, IsolationTicket
from gateway.request.sample import Sample
from gateway.request.state import RequestState
from protos.v1 import inference_pb2, prefill_pb2

logger = logging.getLogger("requests")
WAIT_FOR_WORKERS_S = 0.05
Computed = Callable[[ResolvedRequest, Sequence[Sequence[int]]], None]
"""A function that is called with a request and the outputs that workers have computed after its prompt."""
NO_PAIR = "no pair of prefill and decode workers is ready"


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """The result of an attempt's prefill, which decode continues."""

    route: Route
    done: prefill_pb2.PrefillDone
    isolation: IsolationTicket
    early: EarlyPulls | None = None
    """The copies that have begun during prefill."""


class Attempts:
    """A runner of attempts at requests."""

    def __init__(
        self, workers: Workers, gate: Gate, isolation: Isolation, metrics: Metrics, computed: Computed,
        *, recover_s: float,
    ) -> None:  # fmt: skip
        """`recover_s` is the time in seconds for which a request waits for a worker that can accept it (see
        `_pick_prefill`).
        """
        self._workers = workers
        self._gate = gate
        self._isolation = isolation
        self._metrics = metrics
        self._computed = computed
        self._recover_s = recover_s

    async def run(self, state: RequestState, place: Place) -> None:
        """Runs an attempt until every sample of the request has ended. Raises WorkerLost if the attempt fails and a
        further attempt may follow. Any other error ends the request.
        """
        state.decoded_from = state.output_len
        with ExitStack() as held:
            start, state.head_start = state.head_start, None
            if start is None:
                prefilled = await self._prefill(state, place, held, decode_follows=True)
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
        """Runs only the prefill, and returns the head start with which `run` can continue. Raises the same errors as
        `run`.
        """
        with ExitStack() as held:
            prefilled = await self._prefill(state, place, held)
        return HeadStart(state.request, place, prefilled.route, prefilled.done)

    # --- the first half

    async def _take_over(self, state: RequestState, start: HeadStart, held: ExitStack) -> _Prefilled:
        """Continues from a prefill that another call has run. The prefill counts as an attempt of this request."""
        done = start.done
        state.explanation.enter(inference_pb2.PHASE_KIND_WORKER)
        with PendingTicket.of(self._workers, done) as pending:
            try:
                async with asyncio.timeout(state.remaining_s()):
                    isolation = await self._isolation.enter(state.digest, incarnation(start.route.prefill))
            except TimeoutError:
                raise too_late(state.request.timeout_s) from None
            pending.ticket = None
        held.enter_context(isolation)
        isolation.prefilled(is_heard_of=True)
        state.begin_attempt(start.route)
        state.explanation.prefilled(done, elsewhere=True)
        _account_prefill(state, done)
        return _Prefilled(start.route, done, isolation)

    async def _prefill(
        self, state: RequestState, place: Place, held: ExitStack, *, decode_follows: bool = False
    ) -> _Prefilled:
        """Prefills the prompt and the accepted tokens. Adds the permission to use the worker to `held` and, if decode
        follows at once, the early pulls.
        """
        try:
            async with asyncio.timeout(state.remaining_s()):
                route, isolation = await self._enter_prefill(state)
                held.enter_context(isolation)
                early = EarlyPulls.of(self._workers, self._metrics.pulls, state, route) if decode_follows else None
                done = await self._call_prefill(state, route, held.enter_context(early) if early else None)
                if state.attempts == 1:
                    self._gate.waited(place, state.times.queue_ns / 1e9)
        except TimeoutError:
            raise too_late(state.request.timeout_s) from None
        finally:
            self._workers.keep_promise(place)
        isolation.prefilled(is_heard_of=state.is_heard_of)
        return _Prefilled(route, done, isolation, early)

    async def _enter_prefill(self, state: RequestState) -> tuple[Route, IsolationTicket]:
        """Waits until the request may be sent to a prefill worker. Returns the route and the permission to use the
        route's prefill worker.
        """
        state.explanation.enter(inference_pb2.PHASE_KIND_WORKER)
        route = await self._pick_prefill(state)
        isolation = await self._isolation.enter(state.digest, incarnation(route.prefill))
        if self._workers.failed(route.prefill):  # while this request waited for its turn
            isolation.leave()
            route = await self._pick_prefill(state)
            isolation = await self._isolation.enter(state.digest, incarnation(route.prefill))
        return route, isolation

    async def _pick_prefill(self, state: RequestState) -> Route:
        """Picks a prefill worker that has a decode partner for the request. Raises Unavailable if there is no such
        worker for longer than `recover_s`, not counting the time in which workers are restarting, and DeadlineExceeded
        at the request's deadline.
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

    async def _call_prefill(
        self, state: RequestState, route: Route, early: EarlyPulls | None
    ) -> prefill_pb2.PrefillDone:
        worker, message, again = route.prefill, state.prefill_request(), state.attempts > 0
        if early is not None:
            message.early_tickets.CopyFrom(early.tickets)
        state.begin_attempt(route)
        state.explanation.enter(inference_pb2.PHASE_KIND_PREFILL)
        self._metrics.dispatched("prefill", worker.worker_id)
        try:
            begin = None if early is None else early.begin
            done = await self._workers.prefill(worker, message, state.remaining_s(), begin)
        except WorkerLost:
            state.took(prefill_ns=state.explanation.leave())
            raise
        state.explanation.prefilled(done)
        _account_prefill(state, done)
        self._computed(state.request, [()])
        if again:
            lengths = [len(sample.output_ids) for sample in state.open_samples]
            logger.debug("request %s continues at token %s", state.request.request_id, lengths)
        return done

    # --- the second half

    async def _decode(
        self, state: RequestState, prefilled: _Prefilled, going: list[Sample], ticket: PendingTicket
    ) -> None:
        route, early = prefilled.route, prefilled.early
        if early is not None:
            early.stop()
            route = early.known(route)
        place = self._workers.pick_decode(route, state.need)
        if place is None:
            state.outlet.flush()
            raise WorkerLost("no_decode", counted=self._workers.ready)
        decoded = _longest(state)
        with place:
            await self._bring(state, prefilled.done, place, ticket)
            if early is not None:
                early.close()  # the decode worker's ticket holds the blocks
            await self._continue(state, prefilled, going, place, ticket)
            place.num_steps = _longest(state) - decoded

    async def _bring(
        self, state: RequestState, done: prefill_pb2.PrefillDone, place: DecodePlace, ticket: PendingTicket
    ) -> None:
        """Copies the blocks to the decode worker's arena, if prefill used a different arena, and replaces the ticket
        with the ticket of the copies.
        """
        if done.ticket.arena_id == place.session.record.arena_id:
            return
        state.outlet.flush()  # prefill's tokens need not wait for the copy
        state.explanation.enter(inference_pb2.PHASE_KIND_PULL)
        try:
            arena_id, public_tokens = place.session.record.arena_id, state.request.public_tokens
            pulled = await ticket.move(arena_id, state.quota, public_tokens, state.remaining_s())
        finally:
            state.took(hand_over_ns=state.explanation.leave())
        state.transferred += pulled.num_tokens
        state.explanation.pulled(pulled.num_tokens)
        self._metrics.pulls.pulled(pulled)
        done.ticket.CopyFrom(pulled.ticket)

    async def _continue(
        self, state: RequestState, prefilled: _Prefilled, going: list[Sample], place: DecodePlace, ticket: PendingTicket
    ) -> None:
        """Submits the group to decode, and waits until the group has ended."""
        message, left_s = state.submit_request(prefilled.done, going), state.remaining_s()
        receiver = GroupReceiver(state, place.session, prefilled.isolation)
        state.explanation.decoding(place.session.record.worker_id, place.considered)
        group = receiver.submit(message, going)
        if not group.is_over:  # if the session was lost before, nobody else has the ticket
            ticket.ticket = None
        self._account(state, prefilled, place.session)
        timer = asyncio.get_running_loop().call_later(left_s, group.fail, too_late(state.request.timeout_s))
        try:
            state.outlet.flush()  # decode has the ticket, so prefill's tokens can be sent
            await group.wait()
        except WorkerLost as lost:
            receiver.lost()
            if lost.suspect:
                place.suspect()
            raise
        finally:
            timer.cancel()
            place.session.cancel(group)

    def _account(self, state: RequestState, prefilled: _Prefilled, session: DecodeSession) -> None:
        ticket = prefilled.done.ticket
        state.handed_over = tokens_of(ticket, prefilled.route.prefill.block_size)
        state.explanation.handed_over(ticket, state.handed_over)
        self._metrics.handed_over(state.handed_over)
        self._metrics.dispatched("decode", session.record.worker_id)


def _longest(state: RequestState) -> int:
    """Returns the number of tokens of the longest sample."""
    return max(len(sample.output_ids) for sample in state.samples)


def _account_prefill(state: RequestState, done: prefill_pb2.PrefillDone) -> None:
    state.took(queue_ns=done.timings.queue_ns, prefill_ns=done.timings.prefill_ns)
    if state.sources is None:
        state.sources = convert.sources_from_pb(done.sources)
        state.prompt_logprobs = done.prompt_logprobs
