"""Calls prefill workers, with one streaming call per prompt and one channel per worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio

from common import convert
from common.errors import DeadlineExceeded
from common.rpc import ChannelPool
from common.status import error_of
from common.tracing import CURRENT
from common.trust import NO_TRUST, Trust
from common.types import WorkerLoad, WorkerRecord
from gateway.fleet.liveness import Liveness, LivenessLimits
from gateway.fleet.worker_lost import WorkerLost, incarnation, internal, is_death, queue_full
from protos.v1 import prefill_pb2 as pb
from protos.v1 import prefill_pb2_grpc
from protos.v1 import types_pb2 as types_pb

logger = logging.getLogger("prefill_client")
OnLoad = Callable[[str, WorkerLoad], None]
OnEarly = Callable[[types_pb.Ticket], None]
OnUnread = Callable[[pb.PrefillResponse], None]
_Call: TypeAlias = "grpc.aio.UnaryStreamCall[pb.PrefillRequest, pb.PrefillResponse]"
_LOST = {grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN}


class PrefillClient:
    """A client of all prefill workers. `on_load(worker_id, load)` receives their load reports. A call whose worker
    sends nothing for `silence_s`, not even progress, raises WorkerLost.
    """

    def __init__(
        self, on_load: OnLoad, silence_s: float, trust: Trust = NO_TRUST, on_unread: OnUnread = lambda _: None
    ) -> None:
        """`on_unread` receives a response that had already arrived when its reader was cancelled."""
        self._on_load = on_load
        self._on_unread = on_unread
        self._silence_s = silence_s
        self._trust = trust
        self._channels = ChannelPool(trust)

    async def prefill(
        self, worker: WorkerRecord, request: pb.PrefillRequest, timeout_s: float, on_early: OnEarly | None = None
    ) -> pb.PrefillDone:
        """Prefills a prompt on a worker. `on_early` receives the early tickets that the request asks for. Cancelling
        this coroutine cancels the call. Raises WorkerLost if the request may be sent to a worker again,
        DeadlineExceeded after `timeout_s`, and otherwise the error that the worker reported.
        """
        with self._channels.use(worker.address) as channel:
            return await self._prefill(channel, worker, request, timeout_s, on_early)

    async def keep(self, addresses: Iterable[str]) -> None:
        """Closes idle channels that lead to other addresses or use old certificates."""
        await self._channels.keep(addresses)

    async def close(self) -> None:
        await self._channels.close()

    async def _prefill(
        self, channel: grpc.aio.Channel, worker: WorkerRecord, request: pb.PrefillRequest, timeout_s: float,
        on_early: OnEarly | None,
    ) -> pb.PrefillDone:  # fmt: skip
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]
        metadata = (*self._trust.metadata, *CURRENT.get().metadata)
        call, accepted = stub.Prefill(request, timeout=timeout_s, metadata=metadata), False
        try:
            async with aclosing(_unless_silent(call, self._silence_s, self._on_unread)) as responses:
                async for response in responses:
                    accepted = True
                    if response.HasField("done"):
                        self._on_load(worker.worker_id, convert.load_from_pb(response.done.load))
                        done: pb.PrefillDone = response.done
                        return done
                    if response.HasField("queued"):
                        self._on_load(worker.worker_id, convert.load_from_pb(response.queued.load))
                    if on_early is not None and response.progress.HasField("early_ticket"):
                        on_early(response.progress.early_ticket)
        except grpc.aio.AioRpcError as error:
            raise _translated(error, accepted, worker) from None
        finally:
            call.cancel()
        raise WorkerLost("prefill_ended")


async def _unless_silent(call: _Call, limit_s: float, on_unread: OnUnread) -> AsyncGenerator[pb.PrefillResponse, None]:
    """Yields the responses of a call. Raises WorkerLost after `limit_s` without a response."""
    read: asyncio.Task[Any] | None = None
    is_lost = False

    def lost(seconds: float, why: str) -> None:
        nonlocal is_lost
        is_lost = True
        if read is not None:
            read.cancel()

    liveness = Liveness(LivenessLimits(limit_s), lost)
    liveness.start()
    try:
        while not is_lost:
            read = asyncio.create_task(call.read())  # a separate task, so that a response outlives its reader
            await asyncio.wait({read})
            if read.cancelled():
                read = None
                break
            response, read = read.result(), None
            if response is grpc.aio.EOF:
                return
            liveness.heard()
            yield response
        raise WorkerLost("prefill_silent")
    finally:
        liveness.stop()
        unread = read is not None and not read.cancel() and not read.exception() and read.result()
        if unread and unread is not grpc.aio.EOF:
            on_unread(unread)


def _translated(error: grpc.aio.AioRpcError, accepted: bool, worker: WorkerRecord) -> Exception:
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE and not accepted:
        return WorkerLost("prefill_unreachable", counted=False, unreachable=True)
    if code is grpc.StatusCode.UNAVAILABLE:
        return WorkerLost("prefill_unavailable", death=incarnation(worker) if is_death(error) else None)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        logger.error("prefill worker %s refuses this gateway: %s", worker.worker_id, error.details())
        return WorkerLost("prefill_refuses_us")
    if code in _LOST:
        return WorkerLost(f"prefill_{code.name.lower()}", suspect=code is not grpc.StatusCode.ABORTED)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return queue_full("prefill")
    if code is grpc.StatusCode.INTERNAL:
        return internal("prefill")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the request timed out during prefill")
    return error_of(error)
