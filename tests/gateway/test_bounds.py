"""Limits on clients before they are identified: bytes, time, connections, calls, wrong keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import ResourceExhausted
from common.rpc import PUBLIC, Bounds, Protection, RpcServer
from common.status import error_of
from gateway.api.bodies import BodyBudget
from gateway.api.credentials import Authenticator
from gateway.api.grpc_service import InferenceServicer, key_check
from gateway.api.http_app import HttpApi
from gateway.api.http_protocol import HttpBounds
from gateway.api.server import HttpServer, bind_http
from gateway.api.wrong_keys import WrongKeys
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc
from testing.gateway.parts import Script
from tests.gateway.conftest import MakeRig, Rig

KEY = "s3cret"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The client's preface and empty SETTINGS."""


@pytest.fixture
async def http(make_rig: MakeRig) -> AsyncIterator[Any]:
    """Starts an HTTP server with the given bounds. Returns the port."""
    servers: list[HttpServer] = []

    async def start(bounds: HttpBounds, script: Script | None = None, rig: Rig | None = None) -> int:
        rig = rig or await make_rig(script)
        sock = bind_http("127.0.0.1", 0)
        servers.append(HttpServer(HttpApi(rig.front).app(lambda: True, show_metrics=False, timeout_s=20), sock, bounds))
        await servers[-1].start()
        return int(sock.getsockname()[1])

    yield start
    for server in servers:
        await server.stop(0.2)


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self) -> tuple[int, dict[str, str], Any]:
        """Returns (status, headers, content) of one response."""
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
            content = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, json.loads(content)

    async def closed(self) -> None:
        """Waits until the server closes the connection."""
        async with asyncio.timeout(60):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health?" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        GET + b"x: " + b"a" * 70_000 + b"\r\n\r\n",
        GET + b"x: y\r\n" * 12_000 + b"\r\n",
        GET + b"x: " + b"a" * 1_000_000,  # a header that does not end
        b"GET /" + b"a" * 1_000_000,
    ],
    ids=["long URL", "long header", "many headers", "endless header", "endless URL"],
)
async def test_a_head_is_bounded_in_bytes(http: Any, head: bytes) -> None:
    port = await http(HttpBounds())
    connection = await Connection.open(port)
    with_reply = asyncio.create_task(connection.reply())
    try:
        for begin in range(0, len(head), 8192):
            await connection.send(head[begin : begin + 8192])
            await asyncio.sleep(0.0005)
            if with_reply.done():
                break
    except ConnectionError:
        pass
    status, headers, content = await with_reply
    assert status == 431 and headers["connection"] == "close"
    assert "65536 bytes" in content["error"]["message"] and content["error"]["type"] == "invalid_request_error"


async def test_heads_within_the_bound_are_served_one_after_the_other(http: Any) -> None:
    connection = await Connection.open(await http(HttpBounds()))
    for _ in range(5):
        await connection.send(GET + b"x: " + b"a" * 60_000 + b"\r\n\r\n")
        assert (await connection.reply())[0] == 200
    await connection.send((GET + b"\r\n") * 3)
    assert [(await connection.reply())[0] for _ in range(3)] == [200] * 3


async def test_a_head_is_bounded_in_time_however_it_trickles(http: Any) -> None:
    port = await http(HttpBounds(head_s=0.5))
    silent, slow = await Connection.open(port), await Connection.open(port)

    async def trickle() -> None:
        for byte in GET * 9:
            await slow.send(bytes([byte]))
            await asyncio.sleep(0.1)

    trickling = asyncio.create_task(trickle())
    status, _, content = await slow.reply()
    assert status == 408 and "0.5 s" in content["error"]["message"] and not trickling.done()
    await silent.closed()
    trickling.cancel()
    await asyncio.gather(trickling, return_exceptions=True)


async def test_a_kept_connection_is_closed_when_idle_also_if_it_sends_line_ends(http: Any) -> None:
    port = await http(HttpBounds(head_s=0.5, keep_alive_s=1))
    idle, fidgety = await Connection.open(port), await Connection.open(port)
    for connection in (idle, fidgety):
        await connection.send(GET + b"\r\n")
        assert (await connection.reply())[0] == 200

    async def fidget() -> None:
        while True:
            await fidgety.send(b"\r\n")
            await asyncio.sleep(0.2)

    fidgeting = asyncio.create_task(fidget())
    await idle.closed()
    await fidgety.closed()
    fidgeting.cancel()
    await asyncio.gather(fidgeting, return_exceptions=True)


async def test_an_answer_may_take_longer_than_a_head(http: Any) -> None:
    port = await http(HttpBounds(head_s=0.3, keep_alive_s=1), Script(step_s=0.03))
    body = json.dumps({"prompt": "the mill", "max_tokens": 50}).encode()
    connection = await Connection.open(port)
    await connection.send(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await asyncio.sleep(0.2)
    await connection.send(GET)  # half of the next request's headers
    status, _, content = await connection.reply()
    assert status == 200 and content["usage"]["completion_tokens"] == 50


async def test_connections_are_bounded_in_number_and_say_so(http: Any) -> None:
    port = await http(HttpBounds(connections=3))
    held = [await Connection.open(port) for _ in range(3)]
    surplus = await Connection.open(port)
    await surplus.send(GET + b"\r\n")
    status, headers, content = await surplus.reply()
    assert status == 503 and int(headers["retry-after"]) >= 1 and "max_connections" in content["error"]["message"]
    crowd = [await Connection.open(port) for _ in range(200)]
    await asyncio.gather(*(connection.closed() for connection in crowd))
    await held[0].send(GET + b"\r\n")
    assert (await held[0].reply())[0] == 200, "who was there before is served on"
    held[1].writer.close()
    async with asyncio.timeout(60):
        while status != 200:  # until the server has noticed
            again = await Connection.open(port)
            await again.send(GET + b"\r\n")
            status, *_ = await again.reply()


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"])
async def test_what_is_no_http_has_openais_error_shape(http: Any, raw: bytes) -> None:
    connection = await Connection.open(await http(HttpBounds()))
    await connection.send(raw)
    status, _, content = await connection.reply()
    assert status == 400 and content["error"]["code"] == "invalid_argument"


async def test_another_method_is_told_which_are_allowed(http: Any) -> None:
    connection = await Connection.open(await http(HttpBounds()))
    await connection.send(b"GET /v1/completions HTTP/1.1\r\n\r\n")
    status, headers, content = await connection.reply()
    assert status == 405 and headers["allow"] == "POST" and "only POST" in content["error"]["message"]


def test_bodies_share_a_budget() -> None:
    budget = BodyBudget(100)
    with budget.share() as first:
        first(60)
        with budget.share() as second:
            second(40)
            with pytest.raises(ResourceExhausted, match=r"100 bytes .*body_budget_bytes") as caught:
                second(1)
            assert caught.value.retry_after_s is not None and budget.in_flight == 100
        assert budget.in_flight == 60
    assert budget.in_flight == 0


async def test_wrong_keys_are_bounded_by_address_over_both_fronts(make_rig: MakeRig, http: Any) -> None:
    rig = replace(await make_rig(), authenticator=Authenticator({KEY: "default"}, WrongKeys(5)))
    port = await http(HttpBounds(), rig=rig)
    connection = await Connection.open(port)

    async def models(key: str) -> tuple[int, dict[str, str], Any]:
        claimed = f"x-forwarded-for: 10.0.0.{len(key)}"  # is ignored
        await connection.send(f"GET /v1/models HTTP/1.1\r\nauthorization: Bearer {key}\r\n{claimed}\r\n\r\n".encode())
        return await connection.reply()

    assert (await models(KEY))[0] == 200
    assert [(await models(f"wrong-{i}"))[0] for i in range(5)] == [401] * 5
    status, headers, content = await models("wrong")
    assert status == 429 and int(headers["retry-after"]) >= 1 and "5 a minute" in content["error"]["message"]
    assert (await models(KEY))[0] == 200, "a key that was right from here goes on"
    async with grpc_front(rig, PUBLIC) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(pb.ListModelsRequest(), metadata=(("authorization", "Bearer wrong"),))
    assert isinstance(error_of(caught.value), ResourceExhausted), "the same address"


class grpc_front:
    """A gRPC front with the given bounds."""

    def __init__(self, rig: Rig, bounds: Bounds) -> None:
        check = key_check(rig.authenticator)
        self.server = RpcServer("127.0.0.1", 0, check=check, protection=Protection(bounds=bounds))
        servicer = InferenceServicer(rig.front)
        add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
        self.server.add(add, servicer, "looseleaf.v1.InferenceService")

    async def __aenter__(self) -> Any:
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{self.server.port}", options=[("grpc.max_metadata_size", 1 << 20)]
        )
        return inference_pb2_grpc.InferenceServiceStub(self.channel)  # type: ignore[no-untyped-call]

    async def __aexit__(self, *_: Any) -> None:
        await self.channel.close()
        await self.server.stop(0)


async def test_public_grpc_takes_4_mib_and_bounded_metadata(make_rig: MakeRig) -> None:
    async with grpc_front(await make_rig(), PUBLIC) as stub:
        for num_bytes, code in ((4 << 20, "RESOURCE_EXHAUSTED"), ((4 << 20) - 100, "INVALID_ARGUMENT")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(pb.TokenizeRequest(text="a" * num_bytes), timeout=60)
            assert caught.value.code().name == code
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(pb.ListModelsRequest(), metadata=(("x", "a" * 100_000),), timeout=60)
        assert caught.value.code().name == "RESOURCE_EXHAUSTED"
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models


async def test_calls_at_once_are_bounded(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(step_s=0.05))
    async with grpc_front(rig, replace(PUBLIC, rpcs=3)) as stub:
        calls = [stub.Generate(pb.GenerateRequest(text="the mill")) for _ in range(3)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(pb.ListModelsRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in calls:
            call.cancel()


async def test_grpc_connections_are_bounded_in_number_and_leave_room_again(make_rig: MakeRig) -> None:
    front = grpc_front(await make_rig(), replace(PUBLIC, connections=3))
    async with front as stub:
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models
        two = [await Connection.open(front.server.port) for _ in range(2)]
        for connection in two:
            connection.writer.write(HTTP2_PREFACE)
            assert await asyncio.wait_for(connection.reader.readexactly(9), 60), "the server's settings"
        more = await Connection.open(front.server.port)
        more.writer.write(HTTP2_PREFACE)
        assert await asyncio.wait_for(more.reader.read(), 60) == b""
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models, "who is in stays in"
        two[0].writer.close()
        async with asyncio.timeout(60):
            while True:
                again = await Connection.open(front.server.port)
                again.writer.write(HTTP2_PREFACE)
                if await again.reader.read(9):
                    break
                await asyncio.sleep(0.05)


async def test_grpc_connections_without_a_handshake_or_without_calls_are_closed(make_rig: MakeRig) -> None:
    front = grpc_front(await make_rig(), replace(PUBLIC, handshake_s=0.5, idle_s=0.5))
    async with front as stub:
        silent = await Connection.open(front.server.port)
        await silent.closed()
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models
        async with asyncio.timeout(60):
            while front.channel.get_state() is grpc.ChannelConnectivity.READY:
                await asyncio.sleep(0.05)
        assert (await stub.ListModels(pb.ListModelsRequest(), timeout=60)).models, "the next call connects again"
