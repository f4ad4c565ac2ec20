"""A server that refuses every Generate call over gRPC, or every POST over HTTP. It shows the cost of a refusal in
grpc.aio or uvicorn, for comparison with the gateway.

`python -m loadtest.refuser [http]` prints its address and serves until it is terminated.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import ResourceExhausted
from common.rpc import SERVER_OPTIONS
from common.status import status_of
from gateway.api.asgi import error_response
from gateway.api.server import HttpServer, bind_http

ERROR = ResourceExhausted("full", retry_after_s=1.0)
REFUSAL = rpc_status.to_status(status_of(ERROR))


async def refuse(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort_with_status(REFUSAL)


async def refuse_over_http(request: Request) -> Response:
    return error_response(ERROR)


async def main() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(refuse)}  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("looseleaf.v1.InferenceService", handlers),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


async def main_http() -> None:
    sock = bind_http("127.0.0.1", 0)
    app = Starlette(routes=[Route("/{path:path}", refuse_over_http, methods=["POST"])])
    await HttpServer(app, sock).start()
    print(f"127.0.0.1:{sock.getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main_http() if sys.argv[1:] == ["http"] else main())
