"""DecodeService over gRPC: one session per gateway, one message per step. Never computes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from common import convert
from common.errors import LooseleafError
from common.rpc import HEARTBEAT_S, Context
from common.step_thread import StepThread
from common.types import WorkerLoad
from decode_svc.outputs import Output, Rejection
from decode_svc.outputs import Session as WorkerSession
from decode_svc.scheduler import Group
from decode_svc.worker import DecodeWorker
from engine.sequence import Sequence
from protos.v1 import decode_pb2 as pb
from protos.v1 import decode_pb2_grpc

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
}


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """A session's sequences live as long as its stream."""

    def __init__(self, worker: DecodeWorker, thread: StepThread) -> None:
        self._worker = worker
        self._thread = thread

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        loop = asyncio.get_running_loop()
        responses: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()

        def send(outputs: list[Output], load: WorkerLoad) -> None:  # called in the step thread
            loop.call_soon_threadsafe(responses.put_nowait, _response(outputs, load))

        session = WorkerSession(send)
        reader = asyncio.create_task(self._read(request_iterator, session))
        reader.add_done_callback(lambda _: responses.put_nowait(None))
        try:
            while (response := await _within(HEARTBEAT_S, responses)) is not None:
                yield _merge(response, responses)
        finally:
            reader.cancel()
            self._thread.post(lambda: self._worker.close(session))

    async def _read(self, requests: AsyncIterator[pb.SessionRequest], session: WorkerSession) -> None:
        async for request in requests:
            if request.HasField("submit"):
                self._post_submit(session, request.submit)
            elif request.HasField("cancel"):
                handle = request.cancel.handle
                self._thread.post(lambda handle=handle: self._worker.cancel(session, handle))  # type: ignore[misc]

    def _post_submit(self, session: WorkerSession, submit: pb.Submit) -> None:
        try:
            group, ticket = _group(submit), convert.ticket_from_pb(submit.ticket)
        except (LooseleafError, ValueError) as error:
            logger.error("a submit cannot be read: %s", error)
            rejected = Output(submit.handle, submit.attempt, rejection=Rejection.INTERNAL)
            session.send([rejected], self._worker.load)
            return
        salt = submit.cache_salt
        self._thread.post(lambda: self._worker.submit(session, group, ticket, salt))


def _group(submit: pb.Submit) -> Group:
    sampling = convert.sampling_from_pb(submit.sampling)
    stopping = convert.stopping_from_pb(submit.stopping)
    if len(submit.branches) != len(submit.ticket.branches):
        raise ValueError("a submit must have as many branches as its ticket")
    now = time.monotonic_ns()
    prompt = list(submit.prompt_token_ids)
    sequences = [
        Sequence(prompt, list(branch.output_token_ids), sampling, stopping, branch.sample_index)
        for branch in submit.branches
    ]
    deadline = now + submit.timeout_ms * 1_000_000 if submit.HasField("timeout_ms") else None
    return Group(
        submit.handle, submit.attempt, sequences, priority=submit.priority, deadline_ns=deadline, arrived_ns=now
    )


async def _within(seconds: float, queue: asyncio.Queue[pb.SessionResponse | None]) -> pb.SessionResponse | None:
    """The next response; a heartbeat if there is none for `seconds`."""
    if queue.empty():
        try:
            async with asyncio.timeout(seconds):
                return await queue.get()
        except TimeoutError:
            return pb.SessionResponse()
    return queue.get_nowait()


def _merge(first: pb.SessionResponse, queue: asyncio.Queue[pb.SessionResponse | None]) -> pb.SessionResponse:
    """A slow gateway gets the steps it missed in one message, so that no queue grows with its slowness."""
    while not queue.empty():
        more = queue.get_nowait()
        if more is None:
            queue.put_nowait(None)
            break
        first.outputs.extend(more.outputs)
        first.load.CopyFrom(more.load)
    return first


def _response(outputs: list[Output], load: WorkerLoad) -> pb.SessionResponse:
    return pb.SessionResponse(outputs=[_output(item) for item in outputs], load=convert.load_to_pb(load))


def _output(item: Output) -> pb.SequenceOutput:
    message = pb.SequenceOutput(
        handle=item.handle,
        attempt=item.attempt,
        sample_index=item.sample_index,
        first_index=item.first_index,
        token_ids=item.token_ids,
    )
    if item.logprobs:
        message.logprobs.extend(convert.logprob_to_pb(p) for p in item.logprobs)
    if item.finish_reason is not None:
        message.finish_reason = convert.finish_reason_to_pb(item.finish_reason)
    if item.rejection is not None:
        message.rejection = _REJECTIONS[item.rejection]
    if item.timings is not None:
        message.timings.CopyFrom(convert.timings_to_pb(item.timings))
    return message
