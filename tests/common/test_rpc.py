"""Errors, health and reflection over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common import errors
from common.rpc import RpcServer, open_channel
from common.status import error_of, status_of
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc
from testing.system import check_health


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """A servicer that raises a given error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Tokenize(self, request: pb.TokenizeRequest, context: object) -> pb.TokenizeResponse:
        raise self.error

    async def Generate(self, request: pb.GenerateRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text_delta="first")
        raise self.error


async def serve(error: Exception) -> RpcServer:
    server = RpcServer("127.0.0.1", 0)
    server.add(
        inference_pb2_grpc.add_InferenceServiceServicer_to_server, Servicer(error), "looseleaf.v1.InferenceService"
    )
    await server.start()
    await server.set_ready(True)
    return server


@pytest.mark.parametrize("kind", errors.ALL_ERRORS, ids=lambda kind: kind.__name__)
async def test_every_error_survives_the_wire(kind: type[errors.LooseleafError]) -> None:
    sent = kind("n is 0, it must be 1", violations=(errors.FieldViolation("n", "must be 1"),), retry_after_s=1.5)
    server = await serve(sent)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest(), timeout=60)
        got = error_of(caught.value)
        assert type(got) is kind
        assert (got.message, got.violations, got.retry_after_s) == (sent.message, sent.violations, sent.retry_after_s)
        stream = stub.Generate(pb.GenerateRequest(), timeout=60)
        assert (await stream.read()).text_delta == "first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert type(error_of(caught.value)) is kind
    await server.stop(0)


async def test_an_unexpected_exception_does_not_leak_its_text() -> None:
    server = await serve(ValueError("secret"))
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(pb.TokenizeRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    await server.stop(0)


async def test_health_follows_readiness_and_reflection_lists_the_service() -> None:
    server = await serve(ValueError())
    address = f"127.0.0.1:{server.port}"
    assert await check_health(address)
    assert await check_health(address, service="looseleaf.v1.InferenceService")
    await server.set_ready(False)
    assert not await check_health(address)
    async with open_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="looseleaf.v1.InferenceService")
        reply = await stub.ServerReflectionInfo(iter([request])).read()
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(f) for f in reply.file_descriptor_response.file_descriptor_proto
    ]
    assert "InferenceService" in {service.name for file in files for service in file.service}
    await server.stop(0)


async def test_an_occupied_port_is_one_clear_sentence() -> None:
    server = await serve(ValueError())
    with pytest.raises(errors.StartupError, match=f"127.0.0.1:{server.port}"):
        RpcServer("127.0.0.1", server.port).bind()
    await server.stop(0)


def test_every_error_names_a_grpc_code() -> None:
    for kind in errors.ALL_ERRORS:
        assert status_of(kind("x")).code == grpc.StatusCode[kind.grpc_code].value[0]


async def test_who_was_away_for_long_is_found_again_soon() -> None:
    """By default, gRPC pauses for up to 1, 1.6, 2.6, 4.1, ... seconds between two attempts to connect."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        ask = lambda: stub.Check(health_pb2.HealthCheckRequest(), timeout=60.0)  # noqa: E731
        began = time.monotonic()
        while time.monotonic() - began < 5.5:
            with pytest.raises(grpc.aio.AioRpcError):
                await ask()
            await asyncio.sleep(0.1)
        server = RpcServer("127.0.0.1", port)
        await server.start()
        try:
            found, naps = False, 0  # the naps are counted, so a pause of this process is no delay
            while not found:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await ask()
                    found = True
                await asyncio.sleep(0.02)
                naps += 1
            assert naps * 0.02 < 2.5
        finally:
            await server.stop(0)
