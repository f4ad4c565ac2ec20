"""A gRPC server that refuses every call: what grpc.aio itself takes for a refusal, to compare a gateway's with.

`python -m loadtest.refuser` prints its address and serves until it is terminated.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status

from common.errors import ResourceExhausted
from common.rpc import SERVER_OPTIONS
from common.status import status_of

REFUSAL = rpc_status.to_status(status_of(ResourceExhausted("full", retry_after_s=1.0)))


async def refuse(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort_with_status(REFUSAL)


async def main() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {"Generate": grpc.unary_stream_rpc_method_handler(refuse)}  # type: ignore[arg-type]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("looseleaf.v1.InferenceService", handlers),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
