"""A client of other hosts' block stores, for pulls. It translates between protobuf messages, statuses and our types."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from block_store.ledger.prefix_hash import HASH_BYTES
from block_store.transfer import frames
from block_store.transfer.frames import Frame
from common import convert
from common.errors import Aborted, LooseleafError, Unavailable
from common.rpc import ChannelPool
from common.status import error_of
from common.ticket import Ticket
from common.tracing import CURRENT
from common.trust import NO_TRUST, Trust
from common.types import BlockRef
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

KEEP_TIMEOUT_S = 5.0
# Blocks are much larger than other messages. With gRPC's usual frames of 16 KiB, they would take more CPU time.
_OPTIONS = [("grpc.http2.max_frame_size", 4 << 20), ("grpc.http2.lookahead_bytes", 8 << 20)]
_LOST = {
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
}


@dataclass(frozen=True, slots=True)
class Located:
    """The blocks of a ticket in the memory of the source's NIXL agent."""

    agent: bytes
    """NIXL's metadata of the agent."""
    address: int
    """Address of block 0. Block i begins `i * block_bytes` bytes later."""
    block_bytes: int
    digests: Sequence[int]
    """The digest of each block, which was computed when the block was sealed."""


class SourceClient:
    """A client of the block stores of other hosts, by address. Every call to a store can raise Aborted (the ticket or a
    block is gone), Unavailable (no answer) and other LooseleafErrors.
    """

    def __init__(self, trust: Trust = NO_TRUST) -> None:
        self._trust = trust
        self._channels = ChannelPool(trust, _OPTIONS)
        self._byte_ports: dict[str, int] = {}

    async def prefix_hashes(self, source: str, ticket: Ticket, refs: Sequence[BlockRef]) -> list[bytes]:
        """Extends the ticket's lease, and returns the blocks' prefix hashes (empty for a partial block)."""
        hashes = list((await self._keep(source, ticket, refs)).prefix_hashes)
        if len(hashes) != len(refs) or any(len(one) not in (0, HASH_BYTES) for one in hashes):
            raise Aborted(f"the source named {len(hashes)} of {len(refs)} blocks")
        return hashes

    async def keep(self, source: str, ticket: Ticket) -> float:
        """Extends the ticket's lease, and returns the length of the lease in seconds."""
        return (await self._keep(source, ticket, ())).lease_ms / 1000

    def byte_port(self, source: str) -> int:
        """Returns the port for byte channels that the source last reported, or 0 if it has reported none."""
        return self._byte_ports.get(source, 0)

    async def read(self, source: str, ticket: Ticket, refs: Sequence[BlockRef]) -> AsyncGenerator[Frame, None]:
        """Yields the blocks in frames."""
        with self._channels.use(source) as channel:
            read: Any = channel.unary_stream(frames.METHOD, pb.ReadBlocksRequest.SerializeToString)
            call = read(read_request(ticket, refs), metadata=self._metadata)
            try:
                async for message in call:
                    yield frames.decode(message)
            except ValueError as error:
                raise Aborted(f"the source sent an invalid frame: {error}") from None
            except grpc.aio.AioRpcError as error:
                raise _translated(error) from None
            finally:
                call.cancel()

    async def locate(self, source: str, ticket: Ticket, refs: Sequence[BlockRef]) -> Located:
        """Returns where the source's NIXL agent has the blocks. Raises FailedPrecondition or Unimplemented if the
        source has no agent.
        """
        request = pb.LocateBlocksRequest(
            arena_id=ticket.arena_id,
            table=convert.table_to_pb(refs),
            ticket_epoch=ticket.id.epoch,
            ticket_secret=ticket.id.secret,
        )
        with self._channels.use(source) as channel:
            stub = block_store_pb2_grpc.BlockStoreServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                response: pb.LocateBlocksResponse = await stub.LocateBlocks(
                    request, timeout=KEEP_TIMEOUT_S, metadata=self._metadata
                )
            except grpc.aio.AioRpcError as error:
                raise _translated(error) from None
        return Located(response.agent, response.address, response.block_bytes, list(response.digests))

    async def refresh(self) -> None:
        """Closes channels whose certificates have been replaced, and channels that have not been used for a minute."""
        await self._channels.keep()

    async def close(self) -> None:
        await self._channels.close()

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (*self._trust.metadata, *CURRENT.get().metadata)

    async def _keep(self, source: str, ticket: Ticket, refs: Sequence[BlockRef]) -> pb.KeepTicketResponse:
        request = pb.KeepTicketRequest(
            arena_id=ticket.arena_id,
            ticket_epoch=ticket.id.epoch,
            ticket_secret=ticket.id.secret,
            table=convert.table_to_pb(refs),
        )
        with self._channels.use(source) as channel:
            stub = block_store_pb2_grpc.BlockStoreServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                response: pb.KeepTicketResponse = await stub.KeepTicket(
                    request, timeout=KEEP_TIMEOUT_S, metadata=self._metadata
                )
                self._byte_ports[source] = response.byte_port
                return response
            except grpc.aio.AioRpcError as error:
                raise _translated(error) from None


def read_request(ticket: Ticket, refs: Sequence[BlockRef]) -> pb.ReadBlocksRequest:
    """Returns the request for blocks that a ticket holds."""
    return pb.ReadBlocksRequest(
        arena_id=ticket.arena_id,
        table=convert.table_to_pb(refs),
        ticket_epoch=ticket.id.epoch,
        ticket_secret=ticket.id.secret,
    )


def _translated(error: grpc.aio.AioRpcError) -> LooseleafError:
    if error.code() in _LOST:
        return Aborted("the source no longer has the ticket's blocks")
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable("the source of the blocks does not answer", retry_after_s=1.0)
    return error_of(error)
