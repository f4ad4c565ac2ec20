"""Asks block stores to copy a ticket's blocks to the arena of a decode worker before decode gets the ticket."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from common.errors import DeadlineExceeded
from common.rpc import ChannelPool
from common.tracing import CURRENT
from common.trust import NO_TRUST, Trust
from gateway.fleet.worker_lost import WorkerLost
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

logger = logging.getLogger("pull_client")
NO_ROOM = "pull_no_room"
"""The reason for which an early pull is refused if the destination has too little room."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a block store, and whether the store copies blocks."""

    address: str
    """The address (host:port) of the store's gRPC server."""
    pulls: bool
    """Whether the store copies blocks from other hosts."""


class PullClient:
    """A client of all block stores. The store of the destination makes each copy."""

    def __init__(self, trust: Trust = NO_TRUST) -> None:
        self._trust = trust
        self._channels = ChannelPool(trust)

    async def pull(self, store: str, request: pb.PullRequest, timeout_s: float) -> pb.PullResponse:
        """Makes the block store at the address `store` copy a ticket's blocks, and returns its answer, which contains
        the ticket of the copies. Cancelling this coroutine ends the pull. Raises DeadlineExceeded after `timeout_s`,
        and WorkerLost if the pull fails for another reason.
        """
        with self._channels.use(store) as channel:
            stub = block_store_pb2_grpc.BlockStoreServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                metadata = (*self._trust.metadata, *CURRENT.get().metadata)
                response: pb.PullResponse = await stub.Pull(request, timeout=timeout_s, metadata=metadata)
                return response
            except grpc.aio.AioRpcError as error:
                raise _translated(error, store) from None

    @asynccontextmanager
    async def early(self, store: str, request: pb.PullEarlyRequest, timeout_s: float) -> AsyncIterator[int]:
        """Makes the block store at the address `store` copy blocks of a prompt that is still being computed, and
        yields the number of copied token positions. The store holds the blocks until the end of the `with` statement.
        Raises the errors of `pull`, and if there is too little room, WorkerLost with the reason NO_ROOM.
        """
        with self._channels.use(store) as channel:
            stub = block_store_pb2_grpc.BlockStoreServiceStub(channel)  # type: ignore[no-untyped-call]
            metadata = (*self._trust.metadata, *CURRENT.get().metadata)
            call = stub.PullEarly(request, timeout=timeout_s, metadata=metadata)
            try:
                response = await call.read()
                if response is grpc.aio.EOF:
                    raise WorkerLost("pull_ended", suspect=False)
                yield response.num_tokens
            except grpc.aio.AioRpcError as error:
                raise _translated(error, store) from None
            finally:
                call.cancel()

    async def keep(self) -> None:
        """Closes the idle channels that use old certificates or have not been used for a minute."""
        await self._channels.keep()

    async def close(self) -> None:
        await self._channels.close()


def _translated(error: grpc.aio.AioRpcError, store: str) -> Exception:
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the request timed out while its blocks were pulled to another host")
    if code is grpc.StatusCode.UNAVAILABLE:
        return WorkerLost("pull_unavailable", counted=False, suspect=False, unreachable=True)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return WorkerLost(NO_ROOM, suspect=False)
    if code not in (grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED):
        logger.error("block store %s refuses a pull: %s %s", store, code.name, error.details())
    return WorkerLost(f"pull_{code.name.lower()}", suspect=False)
