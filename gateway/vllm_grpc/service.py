"""The gRPC service VllmEngine for one role: `regular` serves whole requests, `prefill` and `decode` each serve one half
of a request.

Every role uses the same limits, admission and recovery as the gateway's other APIs. A router passes only a name from
prefill to decode (`gateway.request.head_start`). Without a usable name, decode prefills the request itself.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from common.errors import DeadlineExceeded, Unimplemented
from common.guard import Context
from gateway.api.front import Front
from gateway.api.grpc_service import STALLED_CLIENT_S, admitted, authorization, time_left
from gateway.fleet.block_feed import BlockFeed
from gateway.fleet.workers import Workers
from gateway.intake.resolved_request import ResolvedRequest
from gateway.request.delta import Delta
from gateway.request.outlet import LAST_WORD_S, Outlet
from gateway.vllm_grpc.about import About, Role
from gateway.vllm_grpc.kv_events import EventBatches
from gateway.vllm_grpc.replies import Replies, prefill_replies
from gateway.vllm_grpc.requests import embed_wanted_of, first_token_only, head_start_json, head_start_of, wanted_of


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """The gRPC service of one role's endpoint."""

    def __init__(self, role: Role, front: Front, workers: Workers, about: About, feed: BlockFeed) -> None:
        self._role = role
        self._front = front
        self._workers = workers
        self._about = about
        self._feed = feed
        self._running: defaultdict[tuple[str, str], set[asyncio.Task[None]]] = defaultdict(set)
        """The tasks of running requests, by tenant and request id. The ids are the router's and need not be unique."""

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        with admitted(self._front, context) as entry:
            head_start = head_start_of(request) if self._role == "decode" else None
            resolved = await self._resolve(request, context, entry.tenant, head_start)
            entry.take([resolved])
            if self._role == "prefill":
                await self._prefill(resolved, context)
            else:
                await self._generate(resolved, head_start, Replies(resolved, context.write, stream=request.stream))

    async def _resolve(
        self, request: pb.GenerateRequest, context: Context, tenant: str, head_start: str | None
    ) -> ResolvedRequest:
        wanted = wanted_of(request)
        wanted.timeout_s = time_left(context)
        if self._role == "prefill":
            first_token_only(wanted)
        if wanted.seed is None and head_start is not None:
            wanted.seed = self._front.runner.head_starts.seed(head_start)
        return await self._front.validator.resolve(wanted, tenant)

    async def _prefill(self, request: ResolvedRequest, context: Context) -> None:
        name, done = await self._front.runner.prefill(request)
        for reply in prefill_replies(request, done, head_start_json(name)):
            await context.write(reply)

    async def _generate(self, request: ResolvedRequest, head_start: str | None, replies: Replies) -> None:
        in_time = self._front.admission.answers.within(request.timeout_s + STALLED_CLIENT_S)
        async with Outlet(replies.write) as outlet, in_time:
            is_aborted = await self._abortable(request, self._front.runner.run(request, outlet, head_start))
        if is_aborted:
            with suppress(TimeoutError):
                await asyncio.wait_for(replies.abort(), LAST_WORD_S)

    async def _abortable(self, request: ResolvedRequest, work: Coroutine[Any, Any, None]) -> bool:
        """Runs `work`. Returns whether `Abort` has cancelled the work."""
        task = asyncio.create_task(work)
        with self._listed(request, task):
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                await asyncio.wait({task})
        if not task.cancelled():
            task.result()
        return task.cancelled()

    @contextmanager
    def _listed(self, request: ResolvedRequest, task: asyncio.Task[None]) -> Iterator[None]:
        key = (request.tenant, request.request_id)
        self._running[key].add(task)
        try:
            yield
        finally:
            self._running[key].discard(task)
            if not self._running[key]:
                del self._running[key]

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        tenant = self._tenant(context)
        for request_id in request.request_ids:
            for task in self._running.get((tenant, request_id), ()):
                task.cancel()
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        ready = self._workers.ready
        return pb.HealthCheckResponse(healthy=ready, message="" if ready else "no pair of workers is ready")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return self._about.model(self._front.validator.checker().max_model_len)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        return self._about.server(self._role, sum(map(len, self._running.values())))

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        return self._about.loads(self._role)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        for chunk in await asyncio.to_thread(self._about.tokenizer):
            yield chunk

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        with admitted(self._front, context) as entry:
            wanted = embed_wanted_of(request)
            wanted.timeout_s = time_left(context)
            resolved = await self._front.validator.resolve(wanted, entry.tenant)
            entry.take([resolved])
            deltas: list[Delta] = []
            async with Outlet(deltas.extend) as outlet:
                await self._front.runner.run(resolved, outlet)
            embedding = deltas[-1].embedding
            return pb.EmbedResponse(
                embedding=embedding, embedding_dim=len(embedding), prompt_tokens=len(resolved.prompt_ids)
            )

    async def FlushCache(self, request: Any, context: Context) -> common_pb2.FlushCacheResponse:
        raise Unimplemented("FlushCache is not supported: the cache has other users")

    async def StartProfile(self, request: Any, context: Context) -> common_pb2.ProfileResponse:
        raise Unimplemented("StartProfile is not supported")

    async def StopProfile(self, request: Any, context: Context) -> common_pb2.ProfileResponse:
        raise Unimplemented("StopProfile is not supported")

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        tenant = self._tenant(context)
        batches = EventBatches(request.start_sequence_number)
        with self._feed.subscribe(tenant) as subscription:
            await context.send_initial_metadata(())  # a router waits for it
            while (changes := await subscription.next()) is not None:
                for batch in batches.of(changes):
                    if self._tenant(context) != tenant:  # raises Unauthenticated if the key has been withdrawn
                        return
                    try:
                        async with asyncio.timeout(STALLED_CLIENT_S):
                            await context.write(batch)
                    except TimeoutError:
                        raise DeadlineExceeded(f"the subscriber read nothing for {STALLED_CLIENT_S:g} s") from None

    def _tenant(self, context: Context) -> str:
        return self._front.authenticator.tenant(authorization(context))
