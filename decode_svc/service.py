"""DecodeService over gRPC: one session per gateway, one message per step. Never computes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from common import convert
from common.errors import LooseleafError
from common.rpc import HEARTBEAT_S, Context
from common.step_thread import StepThread
from common.types import WorkerLoad
from decode_svc.outputs import Output, Rejection
from decode_svc.outputs import Session as WorkerSession
from decode_svc.submits import read_submit
from decode_svc.worker import DecodeWorker
from protos.v1 import decode_pb2 as pb
from protos.v1 import decode_pb2_grpc

Step = tuple[list[Output], WorkerLoad]
"""What a session hears of a step."""
HEARTBEAT: Step = ([], WorkerLoad())
_NOTHING_MORE = Output(0, 0)[5:]
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

    def __init__(self, worker: DecodeWorker, thread: StepThread, vocab_size: int) -> None:
        self._worker = worker
        self._thread = thread
        self._vocab_size = vocab_size

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[Step | None] = asyncio.Queue()

        def send(outputs: list[Output], load: WorkerLoad) -> None:  # called in the step thread, which then computes on
            loop.call_soon_threadsafe(steps.put_nowait, (outputs, load))

        session = WorkerSession(send)
        reader = asyncio.create_task(self._read(request_iterator, session))
        reader.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (step := await _within(HEARTBEAT_S, steps)) is not None:
                yield _response(step, steps) if step is not HEARTBEAT else pb.SessionResponse()
        finally:
            reader.cancel()
            self._thread.post(lambda: self._worker.close(session))

    async def _read(self, requests: AsyncIterator[pb.SessionRequest], session: WorkerSession) -> None:
        async for request in requests:
            if request.HasField("submit"):
                self._post_submit(session, request.submit)
            elif request.HasField("cancel"):
                self._post_cancel(session, request.cancel)

    def _post_submit(self, session: WorkerSession, submit: pb.Submit) -> None:
        try:
            submission = read_submit(submit, self._vocab_size)
        except (LooseleafError, ValueError) as error:
            logger.error("a submit cannot be read: %s", error)
            rejected = Output(submit.handle, submit.attempt, rejection=Rejection.INTERNAL)
            session.send([rejected], self._worker.load)
            return
        self._thread.post(lambda: self._worker.submit(session, *submission))

    def _post_cancel(self, session: WorkerSession, cancel: pb.Cancel) -> None:
        handle, sample_index = cancel.handle, cancel.sample_index if cancel.HasField("sample_index") else None
        self._thread.post(lambda: self._worker.cancel(session, handle, sample_index))


async def _within(seconds: float, queue: asyncio.Queue[Step | None]) -> Step | None:
    """The next step; a heartbeat if there is none for `seconds`."""
    if queue.empty():
        try:
            async with asyncio.timeout(seconds):
                return await queue.get()
        except TimeoutError:
            return HEARTBEAT
    return queue.get_nowait()


def _response(step: Step, queue: asyncio.Queue[Step | None]) -> pb.SessionResponse:
    """A slow gateway gets the steps it missed in one message, so that no queue grows with its slowness."""
    outputs, load = step
    response = pb.SessionResponse()
    _add(response, outputs)
    while not queue.empty():
        more = queue.get_nowait()
        if more is None:
            queue.put_nowait(None)
            break
        outputs, load = more
        _add(response, outputs)
    response.load.CopyFrom(convert.load_to_pb(load))
    return response


def _add(response: pb.SessionResponse, outputs: list[Output]) -> None:
    """A sample's other outputs than plain tokens come after its last plain one, so their order is not needed."""
    plain: list[Output] = []
    for item in outputs:
        if item[5:] == _NOTHING_MORE and len(item.token_ids) == 1:
            plain.append(item)
        else:
            _add_message(response.outputs.add(), item)
    if plain:
        handles, attempts, samples, first_indices, token_ids, *_ = zip(*plain, strict=True)
        to = response.plain_tokens
        to.handles.extend(handles)
        to.attempts.extend(attempts)
        to.sample_indices.extend(samples)
        to.output_indices.extend(first_indices)
        to.token_ids.extend([token_id for (token_id,) in token_ids])


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
