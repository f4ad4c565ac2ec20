"""Clients that only count messages (`python -m bench.served.frontend_clients grpc|http ADDRESS STREAMS`).

gRPC streams share one connection, as they do for clients in one process. Each HTTP stream has a separate connection.
The process answers each line of its input with a line of JSON: the number of streams that have begun, and the number of
messages received.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any

import grpc.aio

from protos.v1 import inference_pb2 as pb
from protos.v1 import types_pb2

MAX_TOKENS = 1_000_000
PROMPT_IDS = [5, 6, 7, 8]
METHOD = "/looseleaf.v1.InferenceService/Generate"
EVENT = b"data: "


class Count:
    """The counts so far. The event loop writes them; the thread that answers requests for them reads them."""

    def __init__(self) -> None:
        self.begun = 0
        self.messages = 0


class HttpStream(asyncio.Protocol):
    """A streamed completion over a separate connection."""

    def __init__(self, host: str, count: Count) -> None:
        body = json.dumps({"prompt": PROMPT_IDS, "max_tokens": MAX_TOKENS, "stream": True, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._count = count
        self._begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._count.messages += data.count(EVENT)
        if not self._begun and EVENT in data:
            self._begun = True
            self._count.begun += 1


async def open_http(address: str, streams: int, count: Count) -> None:
    host, port = address.rsplit(":", 1)
    for _ in range(streams):
        await asyncio.get_running_loop().create_connection(lambda: HttpStream(address, count), host, int(port))


async def open_grpc(address: str, streams: int, count: Count) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT_IDS),
        stopping=types_pb2.StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
    ).SerializeToString()
    channel = grpc.aio.insecure_channel(address)
    call = channel.unary_stream(METHOD, lambda message: message, lambda message: message)

    async def read() -> None:
        responses: Any = call(request)
        async for number, _ in _numbered(responses):
            count.messages += 1
            count.begun += number == 0

    await asyncio.gather(*(read() for _ in range(streams)))


async def _numbered(responses: Any) -> Any:
    number = 0
    async for response in responses:
        yield number, response
        number += 1


def answer_lines(count: Count) -> None:
    for _ in sys.stdin:
        print(json.dumps({"begun": count.begun, "messages": count.messages}), flush=True)
    os._exit(0)


async def main(kind: str, address: str, streams: str) -> None:
    count = Count()
    threading.Thread(target=answer_lines, args=(count,), daemon=True).start()
    await (open_grpc if kind == "grpc" else open_http)(address, int(streams), count)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
