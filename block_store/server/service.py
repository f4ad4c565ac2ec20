"""BlockStoreService, through which workers attach, operators inspect the store, and other hosts read blocks.

Translates between protobuf and `arena_owner.ArenaOwner`; every blocking call runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, nullcontext
from typing import Any

from block_store.arena.placement import place_name
from block_store.disk.restore import Prefix
from block_store.errors import BlockStoreError, LedgerUnavailable, StaleDataset
from block_store.ledger.prefix_hash import HASH_BYTES
from block_store.ledger.scripts import TICKET_LEASE_S
from block_store.server.arena_owner import ArenaOwner
from block_store.server.inspect_response import check_named, inspected, is_long
from block_store.server.pulls import Pulls
from block_store.server.sizing import CannotSize, WorkerNeeds, granted_floor
from block_store.server.sources import as_statuses, mapped_by, source_of
from block_store.transfer.nixl_agent import NixlAgent
from common import convert
from common.errors import FailedPrecondition, Internal, InvalidArgument, LooseleafError, Unavailable
from common.ticket import Ticket, TicketId
from common.tracing import NO_TRACER, Tracer, traced
from common.types import CacheQuota, Epoch, KvLayout
from protos.v1 import block_store_pb2 as pb

_LOG = logging.getLogger(__name__)


class BlockStoreServicer:
    """The gRPC service of one arena. If there is no arena yet, the first `expect_workers` attachments determine its
    size; later workers use the same arena.
    """

    def __init__(
        self, owner: ArenaOwner, expect_workers: int, attach_timeout_s: float, pulls: Pulls | None = None,
        byte_port: Callable[[], int] = lambda: 0, tracer: Tracer = NO_TRACER, nixl: NixlAgent | None = None,
    ) -> None:  # fmt: skip
        """Creates the service. `pulls` is None if the store does not accept pulls. `byte_port` returns the port of the
        store's byte channels, or 0 if it has none. `nixl` is the agent from which other hosts read.
        """
        self._owner = owner
        self._pulls = pulls
        self._byte_port = byte_port
        self._tracer = tracer
        self._nixl = nixl
        self._expect_workers = expect_workers
        self._timeout_s = attach_timeout_s
        self._layout: KvLayout | None = None
        self._device_uuid = b""
        self._waiting: list[tuple[str, WorkerNeeds]] = []
        """Worker id and needs of each call that waits for the arena. Workers with the same id count as one worker."""
        self._mapping = asyncio.Lock()
        """A lock, so that only one call at a time reads the map or the states of all blocks."""
        self._making: asyncio.Task[None] | None = None
        self._made: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachResponse:
        """Attaches a worker: waits until the arena exists, and returns its location and the worker's floor.

        Fails with INVALID_ARGUMENT if the worker id is empty or the layout is invalid, FAILED_PRECONDITION if the
        layout or the device differs or if there is no room, and UNAVAILABLE if too few workers attach in time or if the
        ledger does not answer.
        """
        layout = _layout_of(request)
        await asyncio.to_thread(self._owner.drop_dead)
        if self._owner.arena is None:
            await self._wait_for_arena(request, layout)
        arena = self._owner.arena
        assert arena is not None
        if arena.placement.device_uuid != request.device_uuid:
            raise FailedPrecondition(
                f"worker {request.worker_id} computes on {place_name(request.device_uuid)}, "
                f"but the arena is on {place_name(arena.placement.device_uuid)}"
            )
        if arena.layout.fingerprint != layout.fingerprint:
            raise FailedPrecondition(
                f"worker {request.worker_id} has a different KV layout ({layout.summary}) from the arena in "
                f"{arena.directory} ({arena.layout.summary})"
            )
        if self._pulls is not None and self._num_holders * request.floor_blocks > arena.num_blocks:
            raise FailedPrecondition(
                f"the arena of {arena.num_blocks} blocks is too small for pulls: {self._num_holders} times the "
                f"{request.floor_blocks} of one group; lower --max-model-len or raise the memory budget"
            )
        if request.floor_blocks > arena.num_blocks:
            raise FailedPrecondition(
                f"floor_blocks {request.floor_blocks} exceeds the arena of {arena.num_blocks}; lower --max-model-len"
            )
        workers, largest = self._num_holders, arena.fixed.largest_floor
        floor = granted_floor(request.floor_blocks, request.role, arena.num_blocks, workers, largest)
        _LOG.info("worker %s (%s) attached", request.worker_id, request.role)
        return pb.AttachResponse(
            arena_id=arena.arena_id, directory=str(arena.directory), num_blocks=arena.num_blocks,
            block_bytes=arena.block_bytes, redis_url=self._owner.redis_url,
            floor_blocks=floor, has_disk_tier=self._owner.disk is not None,
        )  # fmt: skip

    async def Inspect(self, request: pb.InspectRequest, context: Any) -> pb.InspectResponse:
        """Returns the arena's block counts and holders, and the blocks or states that the request asks for. Returns an
        empty response if there is no arena. Fails with INVALID_ARGUMENT for wrong block numbers, and UNAVAILABLE if the
        ledger cannot be read.
        """
        arena, ledger = self._owner.arena, self._owner.ledger
        if arena is None or ledger is None:
            return pb.InspectResponse()
        check_named(request.blocks, arena.num_blocks)
        try:
            async with self._mapping if is_long(request) else nullcontext():
                return await asyncio.to_thread(inspected, request, arena, ledger, self._owner.disk)
        except BlockStoreError as error:
            _LOG.warning("inspect: %s", error)
            raise Unavailable("the ledger in Redis does not answer", retry_after_s=1.0) from error

    async def ReadBlocks(self, request: pb.ReadBlocksRequest, context: Any) -> AsyncIterator[bytes]:
        """Streams the requested blocks of a ticket as serialized messages (`frames.add_to_server`).

        Fails with INVALID_ARGUMENT if the block table is invalid, ABORTED if a block has been reallocated or the ticket
        has ended, PERMISSION_DENIED if the ticket does not hold a block, UNAVAILABLE if the ledger does not answer, and
        with the errors of `source_of`.
        """
        source, ticket = source_of(self._owner, request.arena_id), _ticket_id(request)
        refs = convert.table_from_pb(request.table)
        with traced(self._tracer, "read_blocks") as span, as_statuses():
            span.set({"looseleaf.blocks": len(refs)})
            frames = source.frames(ticket, refs)
            while (frame := await asyncio.to_thread(next, frames, None)) is not None:
                yield frame

    async def KeepTicket(self, request: pb.KeepTicketRequest, context: Any) -> pb.KeepTicketResponse:
        """Extends the lease of a ticket, and returns the prefix hashes of its blocks that the request names.

        Fails with INVALID_ARGUMENT if the block table is invalid, ABORTED if a block has been reallocated or the ticket
        has ended, PERMISSION_DENIED if the ticket does not hold a block, UNAVAILABLE if the ledger does not answer, and
        with the errors of `source_of`.
        """
        source, ticket = source_of(self._owner, request.arena_id), _ticket_id(request)
        refs = convert.table_from_pb(request.table)
        with traced(self._tracer, "keep_ticket"), as_statuses():
            hashes = await asyncio.to_thread(source.keep, ticket, refs)
        lease_ms = round(TICKET_LEASE_S * 1000)
        return pb.KeepTicketResponse(prefix_hashes=hashes, lease_ms=lease_ms, byte_port=self._byte_port())

    async def LocateBlocks(self, request: pb.LocateBlocksRequest, context: Any) -> pb.LocateBlocksResponse:
        """Returns where this store's NIXL agent has mapped a ticket's blocks, and their digests. Extends the ticket's
        lease.

        Fails with FAILED_PRECONDITION if there is no agent, and for the reasons for which `KeepTicket` fails.
        """
        source, ticket = source_of(self._owner, request.arena_id), _ticket_id(request)
        refs, (agent, address) = convert.table_from_pb(request.table), await mapped_by(self._nixl, source.arena)
        with as_statuses():
            digests = await asyncio.to_thread(source.sealed_digests, ticket, refs)
        size = source.arena.block_bytes
        return pb.LocateBlocksResponse(agent=agent, address=address, block_bytes=size, digests=digests)

    async def Pull(self, request: pb.PullRequest, context: Any) -> pb.PullResponse:
        """Copies the blocks of another host's ticket into this arena, and returns a ticket for the copies.

        Fails with INVALID_ARGUMENT if the request is invalid, FAILED_PRECONDITION if this store cannot pull, ABORTED if
        the source no longer has the blocks, and UNAVAILABLE if the source or the ledger does not answer.
        """
        with traced(self._tracer, "pull") as span:
            pulled = await self._able_to_pull().pull(*_asked(request))
            counts = {"blocks": pulled.num_pulled, "blocks_found": pulled.num_found, "bytes": pulled.num_bytes}
            span.set({f"looseleaf.pulled.{name}": count for name, count in counts.items()})
        return pb.PullResponse(
            ticket=convert.ticket_to_pb(pulled.ticket), num_pulled=pulled.num_pulled, num_found=pulled.num_found,
            num_bytes=pulled.num_bytes, num_tokens=pulled.num_tokens, num_early_tokens=pulled.num_early_tokens,
        )  # fmt: skip

    async def PullEarly(self, request: pb.PullEarlyRequest, context: Any) -> AsyncIterator[pb.PullEarlyResponse]:
        """Copies blocks of a prompt that is still being computed, and holds them until the caller ends the call.

        Fails with RESOURCE_EXHAUSTED if there is too little room, and for the reasons for which `Pull` fails.
        """
        async with AsyncExitStack() as held:
            with traced(self._tracer, "pull_early") as span:
                num_tokens = await held.enter_async_context(self._able_to_pull().early(*_asked(request)))
                span.set({"looseleaf.pulled.tokens": num_tokens})
            yield pb.PullEarlyResponse(num_tokens=num_tokens)
            await asyncio.Event().wait()

    async def Restore(self, request: pb.RestoreRequest, context: Any) -> pb.RestoreResponse:
        """Copies blocks of a prompt's prefix from disk into the arena.

        Fails with INVALID_ARGUMENT if the request is invalid, and FAILED_PRECONDITION if this store keeps no blocks on
        disk.
        """
        if (disk := self._owner.disk) is None:
            raise FailedPrecondition("this block store keeps no blocks on disk; start it with --kv-disk")
        if any(len(one) != HASH_BYTES for one in request.prefix_hashes):
            raise InvalidArgument.of("prefix_hashes", f"must have {HASH_BYTES} bytes each")
        try:
            quota = convert.quota_from_pb(request.cache_quota) if request.HasField("cache_quota") else None
        except ValueError as error:
            raise InvalidArgument.of("cache_quota", str(error)) from None
        prefix = Prefix(request.prefix_hashes, quota, request.num_public_blocks)
        return pb.RestoreResponse(num_blocks=await disk.restore(prefix))

    def _able_to_pull(self) -> Pulls:
        if self._pulls is None:
            raise FailedPrecondition("this block store does not pull blocks; start it with --pull-blocks")
        return self._pulls

    @property
    def _num_holders(self) -> int:
        """The expected number of holders with floors: the workers and, if this store pulls blocks, the puller."""
        return self._expect_workers + (self._pulls is not None)

    async def _wait_for_arena(self, request: pb.AttachRequest, layout: KvLayout) -> None:
        if self._made.done():  # the future of an arena that has since been lost
            self._made = asyncio.get_running_loop().create_future()
        if self._waiting and self._layout is not None and self._layout.fingerprint != layout.fingerprint:
            raise FailedPrecondition(
                f"worker {request.worker_id} has a different KV layout ({layout.summary}) from the workers before it "
                f"({self._layout.summary})"
            )
        if self._waiting and self._device_uuid != request.device_uuid:
            raise FailedPrecondition(
                f"worker {request.worker_id} runs on a different device from the workers before it"
            )
        self._layout, self._device_uuid, made = layout, request.device_uuid, self._made
        needs = WorkerNeeds(
            request.weights_bytes, request.peak_activation_bytes, request.max_model_len, request.floor_blocks
        )
        others, call = [worker_id for worker_id, _ in self._waiting], (request.worker_id, needs)
        self._waiting.append(call)
        try:
            if len(dict(self._waiting)) == self._expect_workers and self._making is None:
                self._making = asyncio.create_task(self._make(layout))
            await asyncio.wait_for(asyncio.shield(made), self._timeout_s)
        except TimeoutError:
            attached = [worker_id for worker_id, _ in self._waiting]
            is_repeated = request.worker_id in others or attached.count(request.worker_id) > 1
            raise Unavailable(
                f"{len(set(attached))} of {self._expect_workers} expected workers attached within {self._timeout_s:g} s"
                + (f"; several have the worker_id {request.worker_id}" if is_repeated else "")
            ) from None
        finally:
            self._waiting.remove(call)

    async def _make(self, layout: KvLayout) -> None:
        """Creates the arena. If this fails, all waiting calls fail with the reason, and later workers may try again.
        Runs as a separate task, because the call that started it may end first.
        """
        error: LooseleafError | None = None
        try:
            await asyncio.to_thread(self._owner.create, layout, list(dict(self._waiting).values()), self._device_uuid)
        except (LedgerUnavailable, StaleDataset):
            error = Unavailable("the ledger in Redis does not answer, or was flushed meanwhile")
        except (CannotSize, BlockStoreError) as refusal:
            error = FailedPrecondition(str(refusal))
        except Exception:
            _LOG.exception("the arena could not be created")
            error = Internal("the arena could not be created; the block store's log says why")
        made, self._making = self._made, None
        if error is None:
            made.set_result(None)
            return
        _LOG.error("no arena: %s", error)
        self._made = asyncio.get_running_loop().create_future()
        made.set_exception(error)


def _asked(request: pb.PullRequest | pb.PullEarlyRequest) -> tuple[Ticket, str, CacheQuota | None, int]:
    """Returns the arguments of a pull. Raises InvalidArgument if the ticket or the quota is invalid."""
    try:
        ticket = convert.ticket_from_pb(request.ticket)
        quota = convert.quota_from_pb(request.cache_quota) if request.HasField("cache_quota") else None
    except ValueError as error:
        raise InvalidArgument.of("ticket or cache_quota", str(error)) from None
    return ticket, request.source, quota, request.public_tokens


def _ticket_id(request: pb.ReadBlocksRequest | pb.KeepTicketRequest | pb.LocateBlocksRequest) -> TicketId:
    return TicketId(Epoch(request.ticket_epoch), request.ticket_secret)


def _layout_of(request: pb.AttachRequest) -> KvLayout:
    """Returns the request's layout. Raises InvalidArgument, which names the field, if the worker id is empty or the
    layout is invalid.
    """
    if not request.worker_id:
        raise InvalidArgument.of("worker_id", "must not be empty")
    if not request.layout.groups:
        raise InvalidArgument.of("layout.groups", "must have at least one KV group")
    try:
        layout = convert.layout_from_pb(request.layout)
        positive = layout.block_size > 0 and layout.block_bytes > 0
    except (ValueError, KeyError):
        positive = False
    if not positive:
        raise InvalidArgument.of("layout", "must have known kinds and types and positive sizes")
    return layout
