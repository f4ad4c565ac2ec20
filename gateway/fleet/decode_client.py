"""Sessions with decode workers: one bidirectional stream per worker carries all sequences.

One writer task per session (grpc.aio breaks on concurrent writes), one reader that hands each step's outputs to the
requests' streams. A lost session fails its sequences; they may be prefilled again. Independent of tokens' meaning.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from common import convert
from common.rpc import open_channel
from common.trust import NO_TRUST, Trust
from common.types import WorkerLoad, WorkerRecord
from gateway.fleet.liveness import Silence
from gateway.fleet.lost import WorkerLost, incarnation, is_death
from protos.v1 import decode_pb2 as pb
from protos.v1 import decode_pb2_grpc

logger = logging.getLogger("sessions")
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = 0.5
OnLoad = Callable[[str, WorkerLoad], None]
MIN_PAUSE_S = 0.001
"""Less is not worth a timer."""


class ShortWay(Protocol):
    """Puts plain tokens out without waking the reader of a stream."""

    def pause_s(self, sample: int) -> float:
        """How long the sample's next tokens still wait, to go out together."""

    def take(self, sample: int, first_index: int, token_ids: Sequence[int]) -> bool:
        """Put out tokens from this output index on. False: it cannot, the reader has to."""


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """How long workers may say nothing."""

    silence_s: float = 2.25
    """Not even a heartbeat: the process is frozen, or its host is gone."""
    stall_s: float = 60.0
    """Heartbeats, but no step although it has sequences of ours."""


class OutputStream:
    """The outputs of one submitted sequence group, in order. One reader.

    Bounded by samples and max_tokens: a worker sends each token once.
    """

    __slots__ = ("_closed", "_outputs", "_runs", "_timer", "_waiter", "attempt", "handle", "running", "short_way")

    def __init__(self, handle: int, attempt: int, samples: Iterable[int]) -> None:
        self.handle = handle
        self.attempt = attempt
        self.running = set(samples)
        """Samples, or returned beams, that the worker has not ended and that were not cancelled."""
        self.short_way: ShortWay | None = None
        """Gets plain tokens while the reader waits and there is nothing else to read."""
        self._outputs: list[pb.SequenceOutput] = []
        self._runs: dict[int, pb.SequenceOutput] = {}
        """By sample, the output that its next plain token is added to: its last one in `_outputs`, if that is plain and
        the fast path has not refused it."""
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """While plain tokens wait for the fast path."""
        self._closed: Exception | None = None

    def put(self, output: pb.SequenceOutput) -> bool:
        """Take an output; one of another attempt is late and dropped. Whether the worker is done with the group."""
        if output.attempt != self.attempt:
            return False
        self._stop_timer()
        self._outputs.append(output)
        self._wake()
        if output.finish_reason:
            self.running.discard(output.sample_index)
            return not self.running
        return output.rejection != pb.REJECTION_UNSPECIFIED

    def put_token(self, attempt: int, sample: int, output_index: int, token_id: int) -> None:
        """`put` of one token and nothing else. If the fast path fails, this stream is over, the session goes on."""
        if attempt != self.attempt:
            return
        run = self._runs.get(sample)
        if run is not None and run.first_index + len(run.token_ids) == output_index:
            run.token_ids.append(token_id)
            return
        if not self._outputs and self.short_way is not None and self._reader_waits:
            try:
                if not self._waits(sample) and self.short_way.take(sample, output_index, (token_id,)):
                    return
            except Exception as error:
                return self.fail(error)
        run = self._runs[sample] = pb.SequenceOutput(
            attempt=attempt, sample_index=sample, first_index=output_index, token_ids=[token_id]
        )
        self._outputs.append(run)
        if self._timer is None:
            self._wake()

    def fail(self, error: Exception) -> None:
        """No more outputs will come; what is there is still read."""
        self._closed = self._closed or error
        self._wake()

    async def get(self) -> list[pb.SequenceOutput]:
        """All outputs that are there and did not go the fast path, at least one. Raises what `fail` was given."""
        while self._closed is None and (not self._outputs or self._only_plain):
            self._waiter = asyncio.get_running_loop().create_future()
            if self._outputs and not self._waits(self._outputs[0].sample_index):
                self._deliver()
            try:
                await self._waiter
            finally:
                self._stop_timer()
        if not self._outputs:
            assert self._closed is not None
            raise self._closed
        outputs, self._outputs = self._outputs, []
        self._runs.clear()
        return outputs

    @property
    def _reader_waits(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    @property
    def _only_plain(self) -> bool:
        """Whether what is there may go the fast path: each output is its sample's run."""
        return self.short_way is not None and len(self._runs) == len(self._outputs)

    def _waits(self, sample: int) -> bool:
        """Whether a sample's pause is not over; then what is there by then goes out at its end."""
        assert self.short_way is not None
        pause_s = self.short_way.pause_s(sample)
        if pause_s <= MIN_PAUSE_S:
            return False
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._deliver)
        return True

    def _deliver(self) -> None:
        """Plain tokens take the fast path; from the first that it does not take on, the reader gets them. It gets all
        if it has been woken already: then something else has come."""
        self._timer = None
        if not self._reader_waits:
            return
        assert self.short_way is not None
        outputs, self._outputs = self._outputs, []
        self._runs.clear()
        try:
            for number, run in enumerate(outputs):
                if not self.short_way.take(run.sample_index, run.first_index, run.token_ids):
                    self._outputs = outputs[number:]
                    return self._wake()
        except Exception as error:
            self.fail(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class DecodeSession:
    """The session with one decode worker. It lives as long as `run`."""

    def __init__(self, record: WorkerRecord, on_load: OnLoad, limits: LivenessLimits, trust: Trust = NO_TRUST) -> None:
        self.record = record
        self._trust = trust
        self.connected = False
        self._silence = Silence(limits.silence_s)
        self._limits = limits
        self._on_load = on_load
        self._streams: dict[int, OutputStream] = {}
        self._next_handle = 1
        # Bounded by the requests let in: each puts at most a submit and a cancel per sample.
        self._commands: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._stepped_at = time.monotonic()
        self._reason = "session_lost"
        self._death: str | None = None
        self._run: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return not self._streams

    @property
    def ended(self) -> bool:
        return self._run is not None and self._run.done()

    def start(self) -> None:
        self._run = asyncio.create_task(self._serve(), name=f"session {self.record.worker_id}")

    def submit(self, request: pb.Submit, samples: Iterable[int]) -> OutputStream:
        """Send a group, its `attempt` filled in; the handle is filled in here. It is over when all `samples` are."""
        request.handle = self._next_handle
        self._next_handle += 1
        stream = OutputStream(request.handle, request.attempt, samples)
        if not self.connected:
            stream.fail(WorkerLost("session_lost"))
            return stream
        if self.idle:
            self._stepped_at = time.monotonic()
        self._streams[request.handle] = stream
        self._commands.put_nowait(pb.SessionRequest(submit=request))
        return stream

    def cancel(self, stream: OutputStream) -> None:
        """Drop a group that has not ended; its blocks are released within a step."""
        if self._streams.pop(stream.handle, None) is not None and self.connected:
            self._commands.put_nowait(pb.SessionRequest(cancel=pb.Cancel(handle=stream.handle)))

    def cancel_sample(self, stream: OutputStream, sample: int) -> None:
        """Drop one sample of a group; the last one takes the group with it."""
        if stream.running == {sample}:
            self.cancel(stream)
        elif sample in stream.running and stream.handle in self._streams and self.connected:
            self._commands.put_nowait(pb.SessionRequest(cancel=pb.Cancel(handle=stream.handle, sample_index=sample)))
        stream.running.discard(sample)

    def check_stall(self) -> None:
        """Give the worker up if it has sequences of ours and its steps have said nothing for too long."""
        if self._streams and time.monotonic() - self._stepped_at > self._limits.stall_s:
            self._give_up(self._limits.stall_s, "does not step")

    def _give_up(self, seconds: float, why: str) -> None:
        logger.warning("decode worker %s %s for %.1f s: given up", self.record.worker_id, why, seconds)
        self._reason = "session_silent"
        self.close()

    async def _watch(self) -> None:
        """The end of a frozen process: it keeps its connection, but its heartbeats stop."""
        await self._silence.lasts()
        self._give_up(self._limits.silence_s, "has been silent")

    def close(self) -> None:
        if self._run is not None:
            self._run.cancel()

    async def _serve(self) -> None:
        channel = open_channel(self.record.address, self._trust)
        helpers: list[asyncio.Task[None]] = []
        try:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Session(metadata=self._trust.metadata)  # type: ignore[no-untyped-call]
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await call.wait_for_connection()
            self.connected = True
            self._silence.heard()
            helpers = [asyncio.create_task(self._write(call)), asyncio.create_task(self._watch())]
            async for response in call:
                self._dispatch(response)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "no connection"
            logger.warning("session with decode worker %s ended: %s", self.record.worker_id, code)
            if self.connected and isinstance(error, grpc.aio.AioRpcError) and is_death(error):
                self._death = incarnation(self.record)
        finally:
            self.connected = False
            for helper in helpers:
                helper.cancel()
            self._fail_all()
            await channel.close()

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]) -> None:
        try:
            while True:
                await call.write(await self._commands.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader ends the session

    def _dispatch(self, response: pb.SessionResponse) -> None:
        self._silence.heard()
        if not response.HasField("load"):
            return  # a heartbeat
        self._stepped_at = time.monotonic()
        plain, stream_of = response.plain_tokens, self._streams.get
        for handle, attempt, sample, index, token_id in zip(
            plain.handles, plain.attempts, plain.sample_indices, plain.output_indices, plain.token_ids, strict=True
        ):
            if (stream := stream_of(handle)) is not None:
                stream.put_token(attempt, sample, index, token_id)
        for output in response.outputs:
            stream = stream_of(output.handle)
            if stream is not None and stream.put(output):
                del self._streams[output.handle]
        self._on_load(self.record.worker_id, convert.load_from_pb(response.load))

    def _fail_all(self) -> None:
        for stream in self._streams.values():
            stream.fail(WorkerLost(self._reason, death=self._death))
        self._streams.clear()


class SessionPool:
    """Sessions with all decode workers that the registry names."""

    def __init__(self, on_load: OnLoad, limits: LivenessLimits, trust: Trust = NO_TRUST) -> None:
        self._on_load = on_load
        self._trust = trust
        self._limits = limits
        self._sessions: dict[str, DecodeSession] = {}
        self._retry_at: dict[str, float] = {}
        """By address: a worker's successor is at another one."""

    def get(self, worker_id: str) -> DecodeSession | None:
        """The session with a worker, if it is connected."""
        session = self._sessions.get(worker_id)
        return session if session is not None and session.connected else None

    def usable(self, record: WorkerRecord) -> bool:
        return self.get(record.worker_id) is not None

    def sync(self, records: Iterable[WorkerRecord]) -> None:
        """Open sessions with new workers, drop those that are over. A worker that left the registry keeps its
        session until its sequences are done: it drains."""
        now = time.monotonic()
        wanted = {r.worker_id: r for r in records if r.role == "decode"}
        for worker_id, session in list(self._sessions.items()):
            session.check_stall()
            record = wanted.get(worker_id)
            moved = record is None or record.address != session.record.address
            if session.ended or (moved and session.idle):
                session.close()
                del self._sessions[worker_id]
                self._retry_at[session.record.address] = now + RECONNECT_S
        for worker_id, record in wanted.items():
            if worker_id not in self._sessions and now >= self._retry_at.get(record.address, 0.0):
                session = self._sessions[worker_id] = DecodeSession(record, self._on_load, self._limits, self._trust)
                session.start()
        self._retry_at = {at: t for at, t in self._retry_at.items() if t > now}

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
