"""Clients that each send one short request after another
(`python -m bench.served.frontend_requests grpc|http ADDRESS CLIENTS TOKENS`).

gRPC clients share one connection; each HTTP client has a separate connection and sends requests without streaming. The
process answers each line of its input with a line of JSON: the numbers of answers and of refused requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import threading
from typing import Any

import grpc
import grpc.aio

from bench.served.frontend_clients import METHOD
from protos.v1 import inference_pb2 as pb
from protos.v1 import types_pb2

PROMPT_LEN = 16
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Count:
    """The counts so far. The event loop writes them; the thread that answers requests for them reads them."""

    def __init__(self) -> None:
        self.answers = 0
        self.refused = 0


def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(10, 250) for _ in range(PROMPT_LEN)]


class HttpClient(asyncio.Protocol):
    """A client with one connection, which sends the next request when an answer is complete."""

    def __init__(self, host: str, num_tokens: int, number: int, count: Count) -> None:
        self._host, self._num_tokens, self._count = host, num_tokens, count
        self._rng = random.Random(number)
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        given = {"prompt": prompt(self._rng), "max_tokens": self._num_tokens, "ignore_eos": True, "temperature": 0}
        body = json.dumps(given).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._seen += data
        end = self._seen.find(b"\r\n\r\n")
        found = LENGTH.search(self._seen)
        if end < 0 or found is None or len(self._seen) < end + 4 + int(found[1]):
            return
        if self._seen.startswith(b"HTTP/1.1 200 "):
            self._count.answers += 1
        else:
            self._count.refused += 1
        self._seen = b""
        self._send()


async def run_http(address: str, clients: int, num_tokens: int, count: Count) -> None:
    host, port = address.rsplit(":", 1)
    loop = asyncio.get_running_loop()
    for number in range(clients):
        await loop.create_connection(lambda n=number: HttpClient(address, num_tokens, n, count), host, int(port))  # type: ignore[misc]


async def run_grpc(address: str, clients: int, num_tokens: int, count: Count) -> None:
    channel = grpc.aio.insecure_channel(address)
    call = channel.unary_stream(METHOD, lambda message: message, lambda message: message)

    async def run(number: int) -> None:
        rng = random.Random(number)
        stopping = types_pb2.StoppingParams(max_tokens=num_tokens, ignore_eos=True)
        while True:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt(rng)), stopping=stopping)
            responses: Any = call(request.SerializeToString())
            try:
                async for _ in responses:
                    pass
                count.answers += 1
            except grpc.RpcError:
                count.refused += 1

    await asyncio.gather(*map(run, range(clients)))


def answer_lines(count: Count) -> None:
    for _ in sys.stdin:
        print(json.dumps({"answers": count.answers, "refused": count.refused}), flush=True)
    os._exit(0)


async def main(kind: str, address: str, clients: str, num_tokens: str) -> None:
    count = Count()
    threading.Thread(target=answer_lines, args=(count,), daemon=True).start()
    await (run_grpc if kind == "grpc" else run_http)(address, int(clients), int(num_tokens), count)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
