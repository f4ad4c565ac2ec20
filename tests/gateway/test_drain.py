"""The drain of a gateway: running requests may finish for a while. Others get an error before their connection
closes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc import RpcServer
from common.status import error_of
from gateway.api.grpc_service import InferenceServicer
from gateway.api.http_app import HttpApi
from gateway.api.server import HttpServer, announce_shutdown, bind_http, drain, watch_readiness
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc
from protos.v1 import types_pb2 as types_pb
from testing.gateway.parts import Script
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import until

BODY = {"prompt": "the mill", "max_tokens": 400}
STEP_S = 0.02


@dataclass
class Gateway:
    """A gateway with an HTTP server and a gRPC server around one rig."""

    rig: Rig
    grpc_server: RpcServer
    http_server: HttpServer
    client: httpx.AsyncClient
    stub: Any

    async def drain(self, seconds: float) -> float:
        """Drains the gateway. Returns the seconds that the drain took."""
        began = time.monotonic()
        self.rig.admission.draining = True
        await drain(self.rig.admission.answers, (self.grpc_server, self.http_server), seconds)
        return time.monotonic() - began


@pytest.fixture
async def serve(make_rig: MakeRig) -> AsyncIterator[Any]:
    running: list[Gateway] = []
    channels: list[grpc.aio.Channel] = []

    async def start(script: Script) -> Gateway:
        rig = await make_rig(script)
        grpc_server, sock = RpcServer("127.0.0.1", 0), bind_http("127.0.0.1", 0)
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        grpc_server.add(add, InferenceServicer(rig.front), "looseleaf.v1.InferenceService")
        await grpc_server.start()
        app = HttpApi(rig.front).app(lambda: True, show_metrics=True, timeout_s=60.0)
        http_server = HttpServer(app, sock)
        await http_server.start()
        channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}"))
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=60)
        stub = inference_pb2_grpc.InferenceServiceStub(channels[-1])  # type: ignore[no-untyped-call]
        running.append(Gateway(rig, grpc_server, http_server, client, stub))
        return running[-1]

    yield start
    for gateway, channel in zip(running, channels, strict=True):
        await channel.close()
        await gateway.client.aclose()
        await gateway.grpc_server.stop(0)
        await gateway.http_server.stop(0)


async def stream(gateway: Gateway, **body: Any) -> list[str]:
    """Returns the data of all events. httpx raises if the last chunk is missing."""
    async with gateway.client.stream("POST", "/v1/completions", json={**BODY, "stream": True, **body}) as reply:
        return [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]


async def generate(gateway: Gateway, max_tokens: int = 400) -> tuple[int, grpc.aio.AioRpcError | None]:
    """Returns the received tokens, and the error at the end."""
    count, stopping = 0, types_pb.StoppingParams(max_tokens=max_tokens)
    try:
        async for reply in gateway.stub.Generate(pb.GenerateRequest(text="the mill", stopping=stopping)):
            count += len(reply.token_ids)
    except grpc.aio.AioRpcError as error:
        return count, error
    return count, None


async def test_what_has_not_finished_gets_an_error_and_a_proper_end(serve: Any) -> None:
    gateway = await serve(Script(step_s=STEP_S))
    rig = gateway.rig
    streamed = asyncio.create_task(stream(gateway))
    whole = asyncio.create_task(gateway.client.post("/v1/completions", json=BODY))
    called = asyncio.create_task(generate(gateway))
    await until(lambda: len(rig.script.submitted) == 3)
    rig.script.prefills.append(60.0)
    queued = asyncio.create_task(gateway.client.post("/v1/completions", json={**BODY, "stream": True}))
    await until(lambda: len(rig.script.prefilled) == 4)
    await until(lambda: rig.metric("looseleaf_generation_tokens_total") > 3 * 5)
    assert await gateway.drain(0.3) > 0.25, "it waits for what runs"

    *chunks, error, done = await streamed
    assert done == "[DONE]" and "shutting down" in json.loads(error)["error"]["message"]
    assert 0 < len(chunks) < 400 and all("choices" in json.loads(chunk) for chunk in chunks)
    for reply in (await whole, await queued):
        assert reply.status_code == 503 and "shutting down" in reply.json()["error"]["message"]
        assert reply.headers["retry-after"] == "1"
    count, status = await called
    assert status is not None and status.code() is grpc.StatusCode.UNAVAILABLE and 0 < count < 400
    assert error_of(status).retry_after_s == 1.0
    await until(lambda: len(rig.script.cancelled) == 3 and rig.script.prefills_cancelled == 1)
    assert rig.admission.current == 0


async def test_what_finishes_in_time_is_whole_and_ends_the_drain(serve: Any) -> None:
    gateway = await serve(Script(step_s=STEP_S))
    streamed = asyncio.create_task(stream(gateway, max_tokens=20))
    called = asyncio.create_task(generate(gateway, 20))
    await until(lambda: len(gateway.rig.script.submitted) == 2)
    assert await gateway.drain(300.0) < 60.0
    *chunks, done = await streamed
    assert done == "[DONE]" and json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
    assert await called == (20, None)


async def test_before_the_ports_close_health_says_no_and_requests_are_served(serve: Any) -> None:
    gateway = await serve(Script(step_s=STEP_S))
    server, leaving = gateway.grpc_server, asyncio.Event()
    is_ready = lambda: gateway.rig.workers.ready  # noqa: E731
    watched = asyncio.create_task(watch_readiness(is_ready, [server], lambda: None, lambda: None, leaving))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        health, whole = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        watch = health.Watch(whole)
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        streamed = asyncio.create_task(stream(gateway, max_tokens=60))
        await until(lambda: len(gateway.rig.script.submitted) == 1)
        leaving.set()
        goodbye = asyncio.create_task(announce_shutdown([server], 3600.0))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await health.Check(whole)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await generate(gateway, 5) == (5, None), "new requests are served"
        await asyncio.sleep(0.3)  # the watcher of the workers must not undo this
        assert (await health.Check(whole)).status == health_pb2.HealthCheckResponse.NOT_SERVING and not goodbye.done()
        goodbye.cancel()
        await announce_shutdown([server], 0.1)
    watched.cancel()
    assert await gateway.drain(300.0) < 60.0
    *chunks, _ = await streamed
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
