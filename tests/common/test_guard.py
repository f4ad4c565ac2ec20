"""The guard before every RPC method: it checks credentials before parsing, and invalid bytes get a status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import Unauthenticated
from common.guard import NOT_A_MESSAGE, Context
from common.rpc import RpcServer
from protos.v1 import decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc

GARBAGE = [b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x0f", b"\x07", b"\x0b" * 200]
TOKENIZE = "/looseleaf.v1.InferenceService/Tokenize"
GENERATE = "/looseleaf.v1.InferenceService/Generate"
SESSION = "/looseleaf.v1.DecodeService/Session"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
seen: list[Any] = []


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    async def Tokenize(self, request: Any, context: Context) -> Any:
        seen.append(request)
        return inference_pb2.TokenizeResponse(token_ids=[1])

    async def Generate(self, request: Any, context: Context) -> None:
        seen.append(request)
        await context.write(inference_pb2.GenerateResponse(text_delta="x"))


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    async def Session(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            seen.append(request)
            yield decode_pb2.SessionResponse()


def check(method: str, context: Context) -> None:
    """Accepts callers that send the right metadata."""
    if ("let-me", "in") not in tuple(context.invocation_metadata() or ()):
        raise Unauthenticated(f"{method} is not for you")


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    seen.clear()
    server = RpcServer("127.0.0.1", 0, check=check)
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Inference(), "looseleaf.v1.InferenceService")
    server.add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, Decode(), "looseleaf.v1.DecodeService")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.stop(0)


async def status(channel: grpc.aio.Channel, method: str, messages: list[bytes], *, let_in: bool = True) -> Any:
    """Returns (code, details, number of answers) of a call that sends these messages, one after each answer. Calls
    again if the client lost the server's status: grpc.aio does so if its write meets the end of the call.
    """
    for _ in range(5):
        found = await status_of_one_call(channel, method, messages, let_in=let_in)
        if found[1] != "Internal error from Core":
            break
    return found


async def status_of_one_call(channel: grpc.aio.Channel, method: str, messages: list[bytes], *, let_in: bool) -> Any:
    call = channel.stream_stream(method)(metadata=(("let-me", "in" if let_in else "out"),), timeout=60)
    num_answers = 0
    try:
        for message in messages:
            await call.write(message)
            if message != messages[-1] and await call.read() is not grpc.aio.EOF:
                num_answers += 1
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            num_answers += 1
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    return await call.code(), await call.details(), num_answers


@pytest.mark.parametrize("raw", GARBAGE)
@pytest.mark.parametrize("method", [TOKENIZE, GENERATE, SESSION, REFLECTION])
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, method: str, raw: bytes
) -> None:
    with caplog.at_level(logging.WARNING):
        code, details, num_answers = await status(channel, method, [raw])
    assert (code, details, num_answers) == (grpc.StatusCode.INVALID_ARGUMENT, NOT_A_MESSAGE, 0)
    assert not seen and not caplog.records, "a hostile client could fill the log"


@pytest.mark.parametrize("raw", GARBAGE)
async def test_so_are_they_in_the_middle_of_a_stream(channel: grpc.aio.Channel, raw: bytes) -> None:
    code, details, num_answers = await status(channel, SESSION, [b"", raw])
    assert (code, details, num_answers) == (grpc.StatusCode.INVALID_ARGUMENT, NOT_A_MESSAGE, 1)


@pytest.mark.parametrize("raw", [b"", *GARBAGE])
@pytest.mark.parametrize("method", [TOKENIZE, GENERATE, SESSION])
async def test_who_may_not_call_is_told_so_before_anything_is_parsed(
    channel: grpc.aio.Channel, method: str, raw: bytes
) -> None:
    code, details, _ = await status(channel, method, [raw], let_in=False)
    assert (code, details) == (grpc.StatusCode.UNAUTHENTICATED, f"{method} is not for you") and not seen


async def test_messages_arrive_as_they_were_sent(channel: grpc.aio.Channel) -> None:
    message = inference_pb2.TokenizeRequest(text="the mill")
    assert (await status(channel, TOKENIZE, [message.SerializeToString()]))[0] is grpc.StatusCode.OK
    assert seen == [message]
