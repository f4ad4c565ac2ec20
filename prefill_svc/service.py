"""The gRPC PrefillService, which converts requests to jobs for the step thread, and the jobs' events to responses. It
runs in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace

from common import convert
from common.errors import Internal, LooseleafError, Unavailable
from common.guard import Context
from common.request_ids import take_request_id
from common.tracing import NO_TRACER, Tracer
from common.types import WorkerLoad
from prefill_svc.disk_prefixes import DiskPrefixes
from prefill_svc.events import ChunkDone, Done, Emit, Event, FirstToken
from prefill_svc.job import Job
from prefill_svc.requests import RequestLimits, job_of
from prefill_svc.trace import JobTrace
from prefill_svc.worker import PrefillWorker
from protos.v1 import prefill_pb2 as pb
from protos.v1 import prefill_pb2_grpc, types_pb2
from worker.adapters import AdapterPool
from worker.grammars import Grammars
from worker.heartbeat import Outgoing
from worker.loop_inbox import loop_inbox
from worker.step_thread import StepThread

logger = logging.getLogger("prefill")


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """The gRPC service of a prefill worker. It refuses new requests while `draining` is True."""

    def __init__(
        self,
        worker: PrefillWorker,
        thread: StepThread,
        limits: RequestLimits,
        shared: tuple[Grammars, AdapterPool],
        disk: DiskPrefixes | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """Creates the service. `shared` contains the objects that the roles of the process share. `disk` is None if the
        store has no disk tier.
        """
        self._worker = worker
        self._grammars, self._adapters = shared
        self._thread = thread
        self._limits = limits
        self._disk = disk
        self._tracer = tracer
        self.draining = False
        self.num_calls = 0
        """Number of prompts that are being served."""

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> AsyncIterator[pb.PrefillResponse]:
        if self.draining:
            raise Unavailable("this worker is shutting down", retry_after_s=0.1)
        take_request_id(request.request_id)
        job = job_of(request, self._limits)
        adapter = self._adapters.get(request.adapter)
        for sequence in job.sequences:
            sequence.adapter = adapter
        await self._grammars.prepare(job.sequences)
        logger.debug("attempt %d: %d prompt tokens", request.attempt, len(request.prompt_token_ids))
        trace, events = JobTrace(self._tracer, job), Outgoing[Event]()
        load = _load_with(job, self._worker.load)
        inbox = loop_inbox()

        def emit(event: Event) -> None:  # called in the step thread or in the event loop
            inbox.put(events.put, event)

        submitting = asyncio.ensure_future(self._submit(job, request, emit))
        event: Event = ChunkDone(0)
        self.num_calls += 1
        try:
            yield pb.PrefillResponse(queued=pb.PrefillQueued(load=convert.load_to_pb(load)))
            with events:
                while isinstance(event, ChunkDone):
                    if not (news := await events.get()):
                        event = replace(event, early_ticket=None)
                        yield _response(event)  # a heartbeat repeats the last progress
                    for event in news or ():
                        trace.note(event)
                        yield _response(event)
        finally:
            self.num_calls -= 1
            trace.end(event)
            submitting.cancel()
            if isinstance(event, ChunkDone):
                self._thread.post(lambda: self._worker.cancel(job))

    async def _submit(self, job: Job, request: pb.PrefillRequest, emit: Emit) -> None:
        """Queues a job, after the store has been asked to restore the part of the job's prefix that is on disk."""
        if self._disk is not None:
            try:
                self._worker.begin_chain(job, request.cache_salt, request.public_tokens)
                await self._disk.restore(job.trunk)
            except Exception:
                logger.exception("a prompt was not queued")
                emit(Internal("the prompt could not be queued; the worker's log says why"))
                return
        self._thread.post(lambda: self._worker.submit(job, request.cache_salt, emit, request.public_tokens))


def _load_with(job: Job, load: WorkerLoad) -> WorkerLoad:
    """Returns a load to which a job in the queue has been added. The step thread may not see the job before its current
    step ends, but the gateway must learn at once that the request has been accepted.
    """
    num_waiting, waiting_tokens = load.num_waiting + job.width, load.waiting_tokens + job.num_uncomputed
    return replace(load, num_waiting=num_waiting, waiting_tokens=waiting_tokens)


def _response(event: Event) -> pb.PrefillResponse:
    if isinstance(event, LooseleafError):
        raise event
    if isinstance(event, ChunkDone):
        ticket = None if event.early_ticket is None else convert.ticket_to_pb(event.early_ticket)
        progress = pb.PrefillProgress(num_computed_tokens=event.num_computed_tokens, early_ticket=ticket)
        return pb.PrefillResponse(progress=progress)
    return pb.PrefillResponse(done=_done(event))


def _done(event: Done) -> pb.PrefillDone:
    found = event.candidates
    return pb.PrefillDone(
        ticket=None if event.ticket is None else convert.ticket_to_pb(event.ticket),
        tokens=map(_token, event.tokens),
        sources=convert.sources_to_pb(event.sources),
        timings=convert.timings_to_pb(event.timings),
        prompt_logprobs=[convert.logprob_to_pb(item) for item in event.prompt_logprobs],
        load=convert.load_to_pb(event.load),
        beam_candidates=None if found is None else types_pb2.BeamCandidates(**found._asdict()),
        embedding=event.embedding,
    )


def _token(token: FirstToken) -> pb.BranchToken:
    return pb.BranchToken(
        sample_index=token.sample_index,
        token_id=token.token_id,
        logprob=None if token.logprob is None else convert.logprob_to_pb(token.logprob),
        finish_reason=convert.finish_reason_to_pb(token.finish_reason),
    )
