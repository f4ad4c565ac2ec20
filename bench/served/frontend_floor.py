"""Servers that only send messages, to measure the cost of a streamed message in grpc.aio and uvicorn.

`python -m bench.served.frontend_floor` prints its HTTP and gRPC addresses, then answers each line of its input
(`rate N`) with its pid. At every tick, each open stream gets one prepared message of the usual size. No code of the
gateway runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
from typing import Any

import grpc
import grpc.aio
import uvicorn

from common.rpc import SERVER_OPTIONS
from protos.v1 import inference_pb2 as pb

SERVICE = "looseleaf.v1.InferenceService"
MESSAGE = pb.GenerateResponse(
    request_id="0123456789abcdef" * 2, text_delta=" word", token_ids=[777]
).SerializeToString()
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1790000000,'
    b'"model":"storyteller","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)


class Ticks:
    """A clock that wakes all streams at the same time, `rate` times a second."""

    def __init__(self) -> None:
        self.rate = 25.0
        self._waiters: list[asyncio.Future[None]] = []

    async def next(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + 1 / self.rate, loop.time())
            await asyncio.sleep(due - loop.time())
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


def grpc_server(ticks: Ticks) -> grpc.aio.Server:
    async def generate(request: bytes, context: Any) -> None:
        while True:
            await context.write(MESSAGE)
            await ticks.next()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: Any = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return server


def http_server(ticks: Ticks) -> uvicorn.Server:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while True:
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await ticks.next()

    config = uvicorn.Config(
        app, loop="none", http="httptools", ws="none", lifespan="off", access_log=False, log_config=None
    )
    return uvicorn.Server(config)


def answer_lines(ticks: Ticks) -> None:
    for line in sys.stdin:
        ticks.rate = float(line.split()[1])
        print(json.dumps({"pid": os.getpid()}), flush=True)
    os._exit(0)


async def main() -> None:
    ticks = Ticks()
    server = grpc_server(ticks)
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"127.0.0.1:{sock.getsockname()[1]} 127.0.0.1:{grpc_port}", flush=True)
    threading.Thread(target=answer_lines, args=(ticks,), daemon=True).start()
    await asyncio.gather(ticks.run(), http_server(ticks).serve(sockets=[sock]))


if __name__ == "__main__":
    asyncio.run(main())
