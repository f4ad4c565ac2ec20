"""Sessions with decode workers. One bidirectional stream per worker carries all sequences that this gateway has there.

A session has one writer task, because grpc.aio breaks on concurrent writes, and one reader, which passes each group's
outputs to the group's receiver. If a session is lost, its groups fail, and their requests may be prefilled again. This
module does not interpret tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import grpc.aio

from common import convert
from common.rpc import open_channel
from common.tracing import CURRENT
from common.trust import NO_TRUST, Trust
from common.types import WorkerLoad, WorkerRecord
from gateway.fleet.liveness import Liveness, LivenessLimits
from gateway.fleet.worker_lost import WorkerLost, incarnation, is_death
from protos.v1 import decode_pb2 as pb
from protos.v1 import decode_pb2_grpc

logger = logging.getLogger("sessions")
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = 0.5
OnLoad = Callable[[str, WorkerLoad], None]


class Receiver(Protocol):
    """The interface of an object that receives one group's outputs as they are read. An exception that it raises ends
    the group's attempt, not the session.
    """

    def take_token(self, sample: int, output_index: int, token_id: int) -> None:
        """Takes one token of a sample that continues. The output contains no other data."""

    def take(self, output: pb.SequenceOutput) -> None:
        """Takes an output for which `take_token` does not suffice."""

    def flush(self) -> None:
        """Handles the end of each run of the group's consecutive outputs in a message."""


class SubmittedGroup:
    """A sequence group that was submitted to a worker."""

    __slots__ = ("_error", "_over", "attempt", "handle", "is_over", "receiver", "running")

    def __init__(self, handle: int, attempt: int, samples: Iterable[int], receiver: Receiver) -> None:
        self.handle = handle
        self.attempt = attempt
        self.receiver = receiver
        self.running = set(samples)
        """Samples, or returned beams, that the worker has not ended and that have not been cancelled."""
        self.is_over = False
        """Whether the group accepts no more outputs."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: Exception | None = None

    def end(self) -> None:
        """Ends `wait`, because the receiver needs no more outputs."""
        self.is_over = True
        if not self._over.done():
            self._over.set_result(None)

    def fail(self, error: Exception) -> None:
        """Ends `wait` with an error. No more outputs are accepted. Has no effect after `end` or another failure."""
        if not self.is_over:
            self._error = error
            self.end()

    def take(self, output: pb.SequenceOutput) -> None:
        if not self.is_over:
            try:
                self.receiver.take(output)
            except Exception as error:
                self.fail(error)

    def flush(self) -> None:
        try:
            self.receiver.flush()
        except Exception as error:
            self.fail(error)

    async def wait(self) -> None:
        """Waits until `end` or `fail` is called, and raises the error passed to `fail`."""
        await self._over
        if self._error is not None:
            raise self._error


class DecodeSession:
    """The session with one decode worker, from `start` until the connection is lost or `close` is called."""

    def __init__(self, record: WorkerRecord, on_load: OnLoad, limits: LivenessLimits, trust: Trust = NO_TRUST) -> None:
        self.record = record
        self._trust = trust
        self.connected = False
        self._liveness = Liveness(limits, self._give_up, lambda: not self.idle)
        self._on_load = on_load
        self._groups: dict[int, SubmittedGroup] = {}
        self._next_handle = 1
        # Bounded by the number of admitted requests: each adds at most one submit, and one cancel per sample.
        self._commands: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._reason = "session_lost"
        self._death: str | None = None
        self._run: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        return not self._groups

    @property
    def ended(self) -> bool:
        return self._run is not None and self._run.done()

    def start(self) -> None:
        self._run = asyncio.create_task(self._serve(), name=f"session {self.record.worker_id}")

    def submit(self, request: pb.Submit, samples: Iterable[int], receiver: Receiver) -> SubmittedGroup:
        """Sends a group. The caller has filled in `attempt`; this method fills in the handle and the trace context of
        the current task. The session drops the group when all `samples` have ended. If the session is not connected,
        the group fails at once.
        """
        request.handle, trace = self._next_handle, CURRENT.get()
        request.traceparent, request.tracestate = trace.traceparent, trace.tracestate
        self._next_handle += 1
        group = SubmittedGroup(request.handle, request.attempt, samples, receiver)
        if not self.connected:
            group.fail(WorkerLost("session_lost"))
            return group
        if self.idle:
            self._liveness.stepped()
        self._groups[request.handle] = group
        self._commands.put_nowait(pb.SessionRequest(submit=request))
        return group

    def cancel(self, group: SubmittedGroup) -> None:
        """Drops a group that the session still has, and tells the worker to cancel the group."""
        if self._groups.pop(group.handle, None) is not None and self.connected:
            self._commands.put_nowait(pb.SessionRequest(cancel=pb.Cancel(handle=group.handle)))

    def cancel_sample(self, group: SubmittedGroup, sample: int) -> None:
        """Drops one sample of a group, and tells the worker to cancel the sample. If it is the last running sample,
        drops the group.
        """
        if group.running == {sample}:
            self.cancel(group)
        elif sample in group.running and group.handle in self._groups and self.connected:
            self._commands.put_nowait(pb.SessionRequest(cancel=pb.Cancel(handle=group.handle, sample_index=sample)))
        group.running.discard(sample)

    def _give_up(self, seconds: float, why: str) -> None:
        """Ends the session with a worker that sends nothing or makes no steps. The worker's connection may stay open,
        so no error would end the session.
        """
        logger.warning("decode worker %s %s for %.1f s; ending its session", self.record.worker_id, why, seconds)
        self._reason = "session_silent"
        self.close()

    def close(self) -> None:
        if self._run is not None:
            self._run.cancel()

    async def _serve(self) -> None:
        channel = open_channel(self.record.address, self._trust)
        writer: asyncio.Task[None] | None = None
        try:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Session(metadata=self._trust.metadata)  # type: ignore[no-untyped-call]
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await call.wait_for_connection()
            self.connected = True
            self._liveness.start()
            writer = asyncio.create_task(self._write(call))
            async for response in call:
                self._dispatch(response)
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "no connection"
            logger.warning("session with decode worker %s ended: %s", self.record.worker_id, code)
            if self.connected and isinstance(error, grpc.aio.AioRpcError) and is_death(error):
                self._death = incarnation(self.record)
        finally:
            self.connected = False
            self._liveness.stop()
            if writer is not None:
                writer.cancel()
            self._fail_all()
            await channel.close()

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]) -> None:
        try:
            while True:
                await call.write(await self._commands.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader then ends the session

    def _dispatch(self, response: pb.SessionResponse) -> None:
        self._liveness.heard()
        if not response.HasField("load"):
            return  # a heartbeat
        self._liveness.stepped()
        self._take_tokens(response.plain_tokens)
        self._take_outputs(response.outputs)
        self._on_load(self.record.worker_id, convert.load_from_pb(response.load))

    def _take_tokens(self, plain: pb.PlainTokens) -> None:
        groups, last = self._groups, None
        for handle, attempt, sample, index, token_id in zip(
            plain.handles, plain.attempts, plain.sample_indices, plain.output_indices, plain.token_ids, strict=True
        ):
            group = groups.get(handle)
            if group is not last and last is not None:  # the tokens of a group's samples are adjacent
                last.flush()
            last = group
            if group is None or group.attempt != attempt or group.is_over:
                continue
            try:
                group.receiver.take_token(sample, index, token_id)
            except Exception as error:
                group.fail(error)
        if last is not None:
            last.flush()

    def _take_outputs(self, outputs: Iterable[pb.SequenceOutput]) -> None:
        last = None
        for output in outputs:
            group = self._groups.get(output.handle)
            if last is not None and group is not last:
                last.flush()
            last = group
            if group is None or group.attempt != output.attempt:
                continue
            group.take(output)
            if output.finish_reason:
                group.running.discard(output.sample_index)
            if output.rejection or not group.running:
                self._groups.pop(group.handle, None)
        if last is not None:
            last.flush()

    def _fail_all(self) -> None:
        for group in self._groups.values():
            group.fail(WorkerLost(self._reason, death=self._death))
        self._groups.clear()


class SessionPool:
    """A pool of sessions with decode workers, at most one for each worker."""

    def __init__(self, on_load: OnLoad, limits: LivenessLimits, trust: Trust = NO_TRUST) -> None:
        self._on_load = on_load
        self._trust = trust
        self._limits = limits
        self._sessions: dict[str, DecodeSession] = {}
        self._retry_at: dict[str, float] = {}
        """Time of the next attempt to connect, by address. A worker's successor has a different address."""

    def get(self, worker_id: str) -> DecodeSession | None:
        """Returns the session with a worker, or None if there is no connected session."""
        session = self._sessions.get(worker_id)
        return session if session is not None and session.connected else None

    def usable(self, record: WorkerRecord) -> bool:
        return self.get(record.worker_id) is not None

    def sync(self, records: Iterable[WorkerRecord]) -> None:
        """Drops sessions that have ended, and opens a session with each decode worker that has none, after a pause if
        an earlier session has ended. A worker that has left the registry keeps its session until its groups have ended.
        """
        now = time.monotonic()
        wanted = {r.worker_id: r for r in records if r.role == "decode"}
        for worker_id, session in list(self._sessions.items()):
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
