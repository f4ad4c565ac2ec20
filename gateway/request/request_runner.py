"""Runs one request, from its admission to its last token.

    gate      wait for a place at the workers, by priority and fair share          request_runner.py
    attempt   prefill on one worker, hand the ticket over, decode on another       attempt.py
    retry     after a lost worker: count the loss, wait, then a further attempt    retry.py
    end       every sample has ended, the place is free, the outlet is empty

    prefill's first tokens -+
                            +-> RequestState (tokens, text, stops) -> Outlet -> client
    decode's tokens --------+   state.py                              outlet.py

After the loss of a worker, the prompt and the accepted tokens of the samples that have not ended are prefilled again,
usually with most blocks found in the cache. The client notices only a pause, unless the request may not be tried again
(`retry`). A beam search starts over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tokenizers import Tokenizer

from common.adapters import AdapterRef
from common.errors import LooseleafError, Unavailable
from common.request_ids import REQUEST_ID
from common.tracing import NO_TRACER, Tracer
from gateway.admission.gate import Gate, Place
from gateway.fleet.worker_lost import WorkerLost, too_late
from gateway.fleet.workers import Workers
from gateway.intake.resolved_request import ResolvedRequest
from gateway.metrics import Metrics
from gateway.request.attempt import NO_PAIR, Attempts, Computed
from gateway.request.detokenize import Detokenizers
from gateway.request.explanations import Explanations
from gateway.request.head_start import HeadStart, HeadStarts
from gateway.request.isolation import Isolation, digest_of
from gateway.request.outlet import FEW_STREAMS, MESSAGE_COST_S, Outlet
from gateway.request.retry import Retry
from gateway.request.state import RequestState
from protos.v1 import inference_pb2 as pb
from protos.v1 import prefill_pb2


class RequestRunner:
    """A runner of requests that have been admitted and resolved. It retries a request whose worker is lost."""

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
        computed: Computed = lambda request, outputs: None,
        explanations: Explanations | None = None,
        using: Callable[[AdapterRef | None], AbstractContextManager[None]] = lambda adapter: nullcontext(),
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`using(adapter)` returns a context manager that is open while `run` waits for workers and uses them.

        When `run` ends a request that was sent to a worker, it calls `used(tenant, num_tokens)` with the number of
        tokens in the prompt and the output, and `computed(request, outputs)` with the outputs of all samples.
        `computed` is also called after each prefill, with one empty output, and `used` for a head start that is
        dropped.
        """
        self._workers = workers
        self._gate = gate
        self._detokenizers = Detokenizers(tokenizer)
        self._metrics = metrics
        self._recover_s = recover_s
        self._used = used
        self._computed = computed
        self._using = using
        self._tracer = tracer
        self.explanations = explanations or Explanations(0)
        self.head_starts = HeadStarts(workers, gate, used)
        """Prefills made by `prefill` that no call of `run` has continued yet."""
        self._isolation = Isolation()
        self._attempts = Attempts(workers, gate, self._isolation, metrics, computed, recover_s=recover_s)
        self._retry = Retry(workers, gate, self._isolation, metrics, max_attempts=max_attempts)

    async def run(self, request: ResolvedRequest, outlet: Outlet, head_start: str | None = None) -> None:
        """Produces all samples of a request and writes them through `outlet`. A sample's last delta has
        `finish_reason`, and the request's last delta also has `summary`. Returns when all deltas have been written.

        `head_start` names a prefill that an earlier call has made. If it cannot be used, this call prefills the prompt.

        Cancelling this coroutine cancels the work. Raises a LooseleafError if the request fails; deltas accepted before
        the error may still be pending in the outlet.
        """
        state, error, code = self._begin(request, outlet), "", ""
        self.explanations.add(state.explanation)
        if head_start is not None:
            state.head_start = self.head_starts.take(head_start, request)
        outlet.open(self._interval_s, state.leaves)
        try:
            with self._using(request.adapter):
                await self._produce(state)
            state.explanation.end_attempt("done", state.output_len)
            state.explanation.enter(pb.PHASE_KIND_DELIVERY)
            state.trace.end_attempt()
            await outlet.drained()
        except LooseleafError as failure:
            state.outcome, error, code = "error", failure.message, failure.grpc_code
            raise
        finally:
            summary = state.summary()
            state.explanation.end_attempt("failed", state.output_len)
            state.explanation.end(state.outcome, error, summary)
            state.trace.end(summary, [s.finish_reason.value for s in state.samples if s.finish_reason], code)
            self._metrics.ended(state.outcome, time.monotonic() - state.arrived, summary)
            if summary.attempts:
                self._used(request.tenant, summary.prompt_tokens + summary.completion_tokens)
                self._computed(request, [sample.output_ids for sample in state.samples])

    async def prefill(self, request: ResolvedRequest) -> tuple[str, prefill_pb2.PrefillDone]:
        """Runs a request's prefill, for a later call of `run` that continues it. Returns the name to pass to that call,
        and the result. Cancelling this coroutine cancels the work. Raises a LooseleafError if no attempt succeeds.
        """
        state, code = self._begin(request, Outlet(lambda deltas: None)), ""
        try:
            start = await self._prefill_in_turn(state)
            state.trace.end_attempt()
        except BaseException as failure:
            code = failure.grpc_code if isinstance(failure, LooseleafError) else ""
            if state.attempts:
                self._used(request.tenant, len(request.prompt_ids))
            raise
        finally:
            state.trace.end(state.summary(), [], code)
        return self.head_starts.put(start), start.done

    def _begin(self, request: ResolvedRequest, outlet: Outlet) -> RequestState:
        REQUEST_ID.set(request.request_id)
        digest = digest_of(request.prompt_ids, request.salt + bytes.fromhex(request.adapter_digest))
        return RequestState.begin(request, self._detokenizers, digest, outlet, self._metrics, self._tracer)

    async def _prefill_in_turn(self, state: RequestState) -> HeadStart:
        place = await self._enter(state)
        try:
            while True:
                try:
                    return await self._attempts.prefill(state, place)
                except WorkerLost as lost:
                    await self._retry.prepare(state, place, lost)
        except BaseException:
            self._leave(place)
            raise

    async def _produce(self, state: RequestState) -> None:
        place = await self._enter(state)
        try:
            while state.num_open:
                try:
                    await self._attempts.run(state, place)
                except WorkerLost as lost:
                    await self._retry.prepare(state, place, lost)
        finally:
            self._leave(place)
        self._isolation.survived(state.digest)

    def _leave(self, place: Place) -> None:
        """Gives up a request's place. A request that ends after it was let in again, and before its prefill began, also
        gives up the blocks that were promised to it.
        """
        self._gate.leave(place)
        self._workers.keep_promise(place)

    async def _enter(self, state: RequestState) -> Place:
        """Waits for a place at the workers, unless a head start has kept one. Raises Internal if too many of the
        request's workers have died (`Isolation.check`), Unavailable if no pair of workers has been ready for
        `recover_s`, and DeadlineExceeded if the request gets no place before its deadline.
        """
        if state.head_start is not None:
            state.rank = state.head_start.place.rank
            return state.head_start.place
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
        state.took(queue_ns=state.explanation.leave())
        return place

    def _interval_s(self) -> float:
        """Returns the minimum time in seconds between two messages to one client."""
        num_streams = self._gate.inside
        return num_streams * MESSAGE_COST_S if num_streams > FEW_STREAMS else 0.0
