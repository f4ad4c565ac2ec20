"""The gRPC DecodeService, with one session for each gateway, and one message per step, or per several steps if the
gateway is slow. It runs in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextvars import copy_context
from functools import partial

from common import convert
from common.errors import Aborted, LooseleafError
from common.guard import Context
from common.request_ids import REQUEST_ID
from common.tracing import CURRENT, NO_TRACER, TraceContext, Tracer
from common.types import WorkerLoad
from decode_svc.compiling import Compiling
from decode_svc.outputs import Account, AnyOutput, Output, PlainToken, Rejection
from decode_svc.outputs import Session as WorkerSession
from decode_svc.scheduler import Group
from decode_svc.submits import read_submit
from decode_svc.trace import trace_group
from decode_svc.worker import DecodeWorker
from protos.v1 import decode_pb2 as pb
from protos.v1 import decode_pb2_grpc
from worker.adapters import AdapterPool
from worker.grammars import Grammars
from worker.heartbeat import Outgoing
from worker.loop_inbox import loop_inbox
from worker.step_thread import StepThread

Step = tuple[list[AnyOutput], WorkerLoad]
"""The outputs and the load of one step for a session."""
logger = logging.getLogger("decode")
_REJECTIONS: dict[Rejection | None, pb.Rejection] = {
    None: pb.REJECTION_UNSPECIFIED,
    Rejection.GIVEN_BACK: pb.REJECTION_GIVEN_BACK,
    Rejection.LOST: pb.REJECTION_LOST,
    Rejection.QUEUE_FULL: pb.REJECTION_QUEUE_FULL,
    Rejection.DEADLINE: pb.REJECTION_DEADLINE,
    Rejection.TOO_LARGE: pb.REJECTION_TOO_LARGE,
    Rejection.DRAINING: pb.REJECTION_DRAINING,
    Rejection.INTERNAL: pb.REJECTION_INTERNAL,
    Rejection.GRAMMAR: pb.REJECTION_GRAMMAR,
    Rejection.ADAPTER: pb.REJECTION_ADAPTER,
}


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """The gRPC service of a decode worker. When a session ends, its groups are dropped."""

    def __init__(
        self, worker: DecodeWorker, thread: StepThread, vocab_size: int, shared: tuple[Grammars, AdapterPool],
        tracer: Tracer = NO_TRACER,
    ) -> None:  # fmt: skip
        """Creates the service. `shared` contains the objects that the roles of the process share."""
        self._worker = worker
        self._grammars, self._adapters = shared
        self._thread = thread
        self._vocab_size = vocab_size
        self._tracer = tracer

    async def Session(self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context) -> None:
        inbox, steps = loop_inbox(), Outgoing[Step]()

        def send(outputs: list[AnyOutput], load: WorkerLoad) -> None:  # called in the step thread or the event loop
            inbox.put(steps.put, (outputs, load))

        def on_left(group: Group) -> None:  # called in the step thread
            if self._tracer.is_enabled:
                inbox.put(partial(trace_group, self._tracer), group)

        session, compiling = WorkerSession(send, on_left), Compiling(self._grammars)
        reader = asyncio.create_task(self._read(request_iterator, session, compiling))
        reader.add_done_callback(lambda _: steps.end())
        try:
            with steps:
                while (news := await steps.get()) is not None:
                    await context.write(_response(news))
            reader.result()  # raises the error that ended the stream, such as an invalid message
        finally:
            reader.cancel()
            compiling.close()
            self._thread.post(lambda: self._worker.close(session))

    async def _read(
        self, requests: AsyncIterator[pb.SessionRequest], session: WorkerSession, compiling: Compiling
    ) -> None:
        async for request in requests:
            if request.HasField("submit"):
                copy_context().run(self._post_submit, session, request.submit, compiling)
            elif request.HasField("cancel"):
                self._post_cancel(session, request.cancel, compiling)

    def _post_submit(self, session: WorkerSession, submit: pb.Submit, compiling: Compiling) -> None:
        REQUEST_ID.set(submit.request_id)
        CURRENT.set(TraceContext.of(submit.traceparent, submit.tracestate))
        try:
            submission = read_submit(submit, self._vocab_size)
        except (LooseleafError, ValueError) as error:
            logger.error("the submit of request %s cannot be read: %s", submit.request_id, error)
            rejected = Output(submit.handle, submit.attempt, rejection=Rejection.INTERNAL)
            session.send([rejected], self._worker.load)
            return
        logger.debug("request %s, attempt %d, is group %d", submit.request_id, submit.attempt, submit.handle)

        def post() -> None:
            self._thread.post(lambda: self._worker.submit(session, *submission))

        def refuse(why: Rejection = Rejection.GRAMMAR) -> None:
            self._thread.post(lambda: self._worker.refuse(session, submission.group, submission.ticket, why))

        try:
            adapter = self._adapters.get(submit.adapter)
        except Aborted:
            return refuse(Rejection.ADAPTER)
        for sequence in submission.group.sequences:
            sequence.adapter = adapter
        compiling.run(submission.group, post, refuse)

    def _post_cancel(self, session: WorkerSession, cancel: pb.Cancel, compiling: Compiling) -> None:
        handle, sample_index = cancel.handle, cancel.sample_index if cancel.HasField("sample_index") else None
        compiling.after(handle, lambda: self._thread.post(lambda: self._worker.cancel(session, handle, sample_index)))


def _response(steps: list[Step]) -> pb.SessionResponse:
    """Returns one response with the outputs of all steps, so that a slow gateway gets fewer and larger responses.
    Without steps, the response is a heartbeat.
    """
    response = pb.SessionResponse()
    for outputs, _ in steps:
        _add(response, outputs)
    if steps:
        response.load.CopyFrom(convert.load_to_pb(steps[-1][1]))
    return response


def _add(response: pb.SessionResponse, outputs: list[AnyOutput]) -> None:
    """Adds outputs to a response. The message does not record the order of plain tokens and other outputs, because
    within a sample, all other outputs come after the last plain token.
    """
    plain = [item for item in outputs if type(item) is PlainToken]
    if len(plain) < len(outputs):
        for item in outputs:
            if isinstance(item, Output):
                _add_message(response.outputs.add(), item)
    if plain:
        handles, attempts, samples, output_indices, token_ids = zip(*plain, strict=True)
        to = response.plain_tokens
        to.handles.extend(handles)
        to.attempts.extend(attempts)
        to.sample_indices.extend(samples)
        to.output_indices.extend(output_indices)
        to.token_ids.extend(token_ids)


def _add_message(message: pb.SequenceOutput, item: Output) -> None:
    message.handle, message.attempt = item.handle, item.attempt
    message.sample_index, message.first_index = item.sample_index, item.first_index
    message.token_ids.extend(item.token_ids)
    if item.logprobs:
        message.logprobs.extend(convert.logprob_to_pb(p) for p in item.logprobs)
    if item.finish_reason is not None:
        message.finish_reason = convert.finish_reason_to_pb(item.finish_reason)
    if item.rejection is not None:
        message.rejection = _REJECTIONS[item.rejection]
    if item.beam_score is not None:
        message.beam_score = item.beam_score
    if item.timings is not None:
        message.timings.CopyFrom(convert.timings_to_pb(item.timings))
    if item.account is not None:
        message.account.CopyFrom(_account(item.account))


def _account(account: Account) -> pb.GroupAccount:
    claimed, history = account.claimed_ns, account.history
    if not claimed:
        return pb.GroupAccount()
    started_ns = account.now_ns if history.started_ns is None else history.started_ns
    return pb.GroupAccount(
        claim_ns=claimed - account.arrived_ns,
        waiting_ns=max(0, started_ns - claimed),
        copied_blocks=history.copied_blocks,
        swaps=[
            pb.Swap(
                start_ns=max(0, swap.start_ns - claimed),
                duration_ns=max(0, (account.now_ns if swap.end_ns is None else swap.end_ns) - swap.start_ns),
                blocks_out=swap.blocks_out,
                blocks_in=swap.blocks_in,
            )
            for swap in history.swaps
        ],
    )
