"""PrefillService over gRPC: requests become jobs of the step thread, its events become responses. Never computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from common import convert
from common.errors import InvalidArgument, LooseleafError, Unavailable, Unimplemented
from common.rpc import HEARTBEAT_S, Context
from common.step_thread import StepThread
from engine.sequence import Sequence
from prefill_svc.scheduler import Job
from prefill_svc.worker import Done, Event, PrefillWorker, Progress
from protos.v1 import prefill_pb2 as pb
from protos.v1 import prefill_pb2_grpc


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """One stream per prompt. `draining` refuses new ones."""

    def __init__(self, worker: PrefillWorker, thread: StepThread, max_model_len: int, vocab_size: int) -> None:
        self._worker = worker
        self._thread = thread
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self.draining = False
        self.num_calls = 0
        """Prompts that are being served."""

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> AsyncIterator[pb.PrefillResponse]:
        if self.draining:
            raise Unavailable("this worker shuts down", retry_after_s=0.1)
        job = self._job(request)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:  # called in the step thread
            loop.call_soon_threadsafe(events.put_nowait, event)

        self._thread.post(lambda: self._worker.submit(job, request.cache_salt, emit))
        event: Event = Progress(0)
        self.num_calls += 1
        try:
            yield pb.PrefillResponse(queued=pb.PrefillQueued(load=convert.load_to_pb(self._worker.load)))
            while isinstance(event, Progress):
                event = await _within(HEARTBEAT_S, events, event)
                yield _response(event)
        finally:
            self.num_calls -= 1
            if isinstance(event, Progress):
                self._thread.post(lambda: self._worker.cancel(job))

    def _job(self, request: pb.PrefillRequest) -> Job:
        """Checked here too: a worker never trusts that its caller has checked."""
        if len(request.branches) > 1:
            raise Unimplemented("branches: more than one sample per request is not supported yet")
        outputs = list(request.branches[0].output_token_ids) if request.branches else []
        sample_index = request.branches[0].sample_index if request.branches else 0
        prompt = list(request.prompt_token_ids)
        if not prompt:
            raise InvalidArgument.of("prompt_token_ids", "must hold at least one token")
        if len(prompt) + len(outputs) >= self._max_model_len:
            raise InvalidArgument.of("prompt_token_ids", f"must be shorter than {self._max_model_len} tokens")
        sampling = convert.sampling_from_pb(request.sampling)
        stopping = convert.stopping_from_pb(request.stopping)
        biased = [token for token, _ in sampling.logit_bias]
        if max(*prompt, *outputs, *biased, *stopping.stop_token_ids, 0) >= self._vocab_size:
            raise InvalidArgument.of("token ids", f"must be below the vocabulary size {self._vocab_size}")
        if max(sampling.logprobs or 0, sampling.prompt_logprobs or 0) > self._vocab_size:
            raise InvalidArgument.of("logprobs", f"must be at most the vocabulary size {self._vocab_size}")
        sequence = Sequence(prompt, outputs, sampling, stopping, sample_index)
        return Job(sequence, priority=request.priority, arrived_ns=time.monotonic_ns())


async def _within(seconds: float, events: asyncio.Queue[Event], last: Progress) -> Event:
    """The next event; the last progress again, as a heartbeat, if there is none for `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await events.get()
    except TimeoutError:
        return last


def _response(event: Event) -> pb.PrefillResponse:
    if isinstance(event, LooseleafError):
        raise event
    if isinstance(event, Progress):
        return pb.PrefillResponse(progress=pb.PrefillProgress(num_computed_tokens=event.num_computed_tokens))
    return pb.PrefillResponse(done=_done(event))


def _done(event: Done) -> pb.PrefillDone:
    token = pb.BranchToken(
        sample_index=event.sample_index,
        token_id=event.token_id,
        logprob=None if event.logprob is None else convert.logprob_to_pb(event.logprob),
        finish_reason=convert.finish_reason_to_pb(event.finish_reason),
    )
    return pb.PrefillDone(
        ticket=None if event.ticket is None else convert.ticket_to_pb(event.ticket),
        tokens=[token],
        sources=convert.sources_to_pb(event.sources),
        timings=convert.timings_to_pb(event.timings),
        prompt_logprobs=[convert.logprob_to_pb(item) for item in event.prompt_logprobs],
        load=convert.load_to_pb(event.load),
    )
