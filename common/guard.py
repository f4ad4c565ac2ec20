"""The guard that runs before every method of every service. It checks the caller, parses the message, and calls the
method.

Only this module converts exceptions to gRPC statuses. A service never returns UNKNOWN or an exception's text.
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

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Check = Callable[[str, Context], None]
"""Called with a method's full name ("/package.Service/Method") before anything that the caller sent is parsed. Raises a
LooseleafError if the caller may not use the method.
"""
Parse = Callable[[bytes], Any]
NOT_A_MESSAGE = "the request is not a message of this method's type"
logger = logging.getLogger("rpc")


def anybody(method: str, context: Context) -> None:
    """A check that admits every caller."""


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor that makes every method receive its requests as bytes, and parses them after the check.

    To gRPC, each method accepts a stream of requests, and no request is received before it is read. A message from an
    unauthorized caller therefore never gets into memory.
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
    """The handler of one call of a method."""

    def __init__(self, name: str, handler: Any, check: Check) -> None:
        self._name = name
        self._handler = handler
        self._check = check

    async def run(self, raws: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        try:
            self._check(self._name, context)
            result = await self._begin(raws, context)
            if not asyncio.iscoroutine(result):
                async with aclosing(result) as responses:  # ends it with the call, not when it is garbage-collected
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
