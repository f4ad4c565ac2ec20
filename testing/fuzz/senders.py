"""Sends single inputs, and returns their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message

from testing.fuzz import inputs

Metadata = tuple[tuple[str, str], ...]
TIMEOUT_S = 60.0
"""The number of seconds after which a call counts as hung. A gRPC call has a shorter deadline (CALL_S), after which it
should end with `DEADLINE_EXCEEDED`.
"""
_OWN_WORDS = "Internal error from Core"
"""The message that `grpc.aio`, not the server, generates if the server ends a stream while the client is still writing
to it.
"""
CALL_S = 3.0
"""The deadline of a gRPC call, in seconds."""


@dataclass(frozen=True, slots=True)
class Method:
    """An RPC at one address, with the metadata to send."""

    address: str
    service: str
    descriptor: MethodDescriptor
    metadata: Metadata

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.descriptor.name}"

    @property
    def takes(self) -> type[Message]:
        return message_factory.GetMessageClass(self.descriptor.input_type)

    @property
    def is_stream(self) -> bool:
        return self.descriptor.client_streaming


def methods_of(address: str, service: ServiceDescriptor, metadata: Metadata) -> list[Method]:
    return [Method(address, service.full_name, method, metadata) for method in service.methods]


class GrpcSender:
    """A gRPC client with one channel for each address."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def send(self, draw: random.Random, method: Method) -> str:
        """Makes one call with random messages. Returns the name of the status, with the server's message if the status
        is UNKNOWN or INTERNAL. Returns "HANG" if the call does not end in time, and "ENDED WHILE SENDING" if the server
        ended the stream while the client was writing.
        """
        channel = self._channels.get(method.address)
        if channel is None:
            channel = self._channels[method.address] = grpc.aio.insecure_channel(method.address)
        many = draw.randrange(6) if method.is_stream else 1
        wholes = [inputs.message(draw, method.takes).SerializeToString() for _ in range(many)]
        sent = [inputs.almost(draw, whole) if draw.random() < 0.4 else whole for whole in wholes]
        made: Any = channel.stream_stream(method.path) if method.is_stream else channel.unary_stream(method.path)
        options: Any = {"timeout": CALL_S, "metadata": method.metadata}
        call: Any = made(iter(sent) if method.is_stream else sent[0], **options)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                count = 0
                async for _ in call:
                    count += 1
                    if count > draw.randrange(1, 400):
                        call.cancel()
                return await _status_of(call)
        except TimeoutError:
            call.cancel()
            return "HANG"
        except asyncio.CancelledError:
            return "CANCELLED"
        except grpc.RpcError:
            return await _status_of(call)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


async def _status_of(call: Any) -> str:
    name = str((await call.code()).name)
    details = str(await call.details()) if name in ("UNKNOWN", "INTERNAL") else ""
    if details == _OWN_WORDS:
        return "ENDED WHILE SENDING"
    return f"{name}: {details}" if details else name


async def send_http(draw: random.Random, address: str) -> str:
    """Sends one HTTP input. Returns the status of the response, CLOSED if there was no HTTP response, or HANG if the
    server does not answer in time. After a status of 500 or more, also returns the end of the response and the
    beginning of the request.
    """
    host, port = address.rsplit(":", 1)
    request = inputs.http(draw)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                writer.write(request)
                await writer.drain()
                if draw.random() < 0.97:  # the gateway waits 30 s for the rest of a body
                    writer.write_eof()
                head = await reader.read(64)
                rest = await reader.read(1 << 20) if draw.random() < 0.9 else b""
                if not head.startswith(b"HTTP/1."):
                    return "CLOSED"
                status = head.split(b" ", 2)[1].decode()
                return status if status < "500" else f"{status}: {rest[-300:]!r} to {request[:2000]!r}"
            return "CLOSED"
    except TimeoutError:
        return "HANG"
