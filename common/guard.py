"""The guard that runs before every method of an `RpcServer`. It checks the caller, parses the message, and calls the
method.

The guard converts the exceptions of methods, except those of grpc.aio itself, to gRPC statuses. The text of an
unexpected exception goes to the log, and not to the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_status import rpc_status

from common.errors import Internal, InvalidArgument, LooseleafError
from common.status import error_of, status_of
from common.tracing import CURRENT, TraceContext

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Check = Callable[[str, Context], None]
"""A function that is called with a method's full name ("/package.Service/Method") before a message of the caller is
parsed. It raises a LooseleafError if the caller may not use the method.
"""
Parse = Callable[[bytes], Any]
NOT_A_MESSAGE = "the request is not a message of this method's type"
logger = logging.getLogger("rpc")


def anybody(method: str, context: Context) -> None:
    """A `Check` that admits every caller."""


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that receives the requests of every method as bytes, and parses them after the check. It declares
    every method to gRPC as one with a stream of requests, so that no message is received before the caller has been
    checked.
    """

    def __init__(self, check: Check = anybody) -> None:
        self._check = check

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        run = _Call(handler_call_details.method, handler, self._check).run
        return grpc.stream_stream_rpc_method_handler(run, None, handler.response_serializer)


class _Call:
    """A call of a method."""

    def __init__(self, name: str, handler: Any, check: Check) -> None:
        self._name = name
        self._handler = handler
        self._check = check

    async def run(self, raws: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        CURRENT.set(TraceContext.of_headers(context.invocation_metadata() or ()))
        try:
            self._check(self._name, context)
            result = await self._begin(raws, context)
            if not asyncio.iscoroutine(result):
                async with aclosing(result) as responses:  # closes the generator when the call ends
                    async for response in responses:
                        yield response
            elif self._handler.response_streaming:  # the method itself writes to the context
                await result
            else:
                yield await result
        except Exception as error:
            await _abort(context, error)

    async def _begin(self, raws: AsyncIterator[bytes], context: Context) -> Any:
        parse = self._handler.request_deserializer
        if self._handler.request_streaming:
            method = self._handler.stream_stream or self._handler.stream_unary
            return method(_each(parse, raws), context)
        method = self._handler.unary_stream or self._handler.unary_unary
        raw = await context.read()
        if raw is grpc.aio.EOF:
            raise InvalidArgument(NOT_A_MESSAGE)
        return method(_parsed(parse, raw), context)


def _parsed(parse: Parse, raw: bytes) -> Any:
    try:
        return parse(raw)
    except Exception:  # the exception type depends on protobuf's implementation
        raise InvalidArgument(NOT_A_MESSAGE) from None


async def _each(parse: Parse, raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for raw in raws:
        yield _parsed(parse, raw)


async def _abort(context: Context, error: Exception) -> None:
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.BaseError)):
        raise error
    if isinstance(error, grpc.RpcError):
        error = error_of(error)
    if not isinstance(error, LooseleafError):
        logger.error("unexpected failure in a handler", exc_info=error)
        error = Internal("the service failed; its log says why")
    status = rpc_status.to_status(status_of(error))
    given = tuple(context.trailing_metadata() or ())
    await context.abort_with_status(status._replace(trailing_metadata=(*given, *status.trailing_metadata)))
