"""What HTTP needs below the API: bounded bodies, clients that go away, event streams, errors as OpenAI's JSON."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import Cancelled, DeadlineExceeded, Internal, InvalidArgument, LooseleafError
from gateway.api.openai_reply import DONE, dumps, error_body
from gateway.request.direct import Direct

logger = logging.getLogger("http")
T = TypeVar("T")
BODY_TIMEOUT_S = 30.0
LAST_WORD_S = 5.0
"""A client that does not read is not told its error for longer."""
SERVER_SEND = "looseleaf.send"
OnError = Callable[[LooseleafError], None]
Endpoint = Callable[[Request], Awaitable[Response]]


class BodyTooLarge(InvalidArgument):
    http_status = 413


def error_response(error: LooseleafError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(dumps(error_body(error)), error.http_status, headers, "application/json")


def expected(error: Exception) -> LooseleafError:
    """What a client is told of an exception; the unexpected goes to the log."""
    if isinstance(error, LooseleafError):
        return error
    logger.error("unexpected failure in a handler", exc_info=error)
    return Internal("the service failed; its log says why")


def guarded(endpoint: Endpoint, on_error: OnError) -> Endpoint:
    """An endpoint whose exceptions become OpenAI's error bodies."""

    @functools.wraps(endpoint)
    async def run(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            known = expected(error)
            on_error(known)
            return error_response(known)

    return run


async def read_body(request: Request, limit: int, take: Callable[[int], None]) -> bytearray:
    """The body, of bounded size and in bounded time; `take` hears of its bytes as they come and may refuse them."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                if len(body) + len(part) > limit:
                    raise _too_large(limit)
                take(len(part))
                body += part
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None
    return body


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away (Cancelled). The body has been read."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client went away")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event_message(event: bytes) -> dict[str, Any]:
    """ASGI's message for a server-sent event that is not the last."""
    return {"type": "http.response.body", "body": event, "more_body": True}


def with_server_send(app: ASGIApp) -> ASGIApp:
    """`app`, with the server's own `send` in the scope: Starlette wraps it three times over, for every message."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await app(scope, receive, send)

    return run


class EventStream(Response):
    """Server-sent events, ready-made by an async iterator; closed when the client goes away.

    Headers wait for the first event, so that what fails before it has its own status.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        direct: Direct[Any],
        on_error: OnError,
        scope: AbstractAsyncContextManager[None],
        at_end: contextlib.ExitStack,
    ) -> None:
        """`direct` may send events too, made by `event_message`, from the first event on. All is written within
        `scope` (`OpenAnswers.within`). `at_end` is closed when there is nothing more to send."""
        self._events = events
        self._direct = direct
        self._on_error = on_error
        self._scope = scope
        self._at_end = at_end
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._at_end:
                await while_connected(receive, self._serve(scope, receive, send))
        except Cancelled:
            logger.debug("a client went away")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with self._scope, aclosing(self._events) as events:  # type: ignore[type-var]
                async for event in events:
                    if not started:
                        started = True
                        await send(_STREAM_START)
                        self._direct.open(scope.get(SERVER_SEND, send))
                    await self._direct.write(event_message(event))
        except Exception as failure:
            error = expected(failure)
        else:
            await send({"type": "http.response.body", "body": DONE})
            return
        self._on_error(error)
        try:
            async with asyncio.timeout(LAST_WORD_S):
                if not started:
                    await error_response(error)(scope, receive, send)
                    return
                with contextlib.suppress(Exception):
                    await self._direct.settle()
                last = b"data: " + dumps(error_body(error)) + b"\n\n" + DONE
                await send({"type": "http.response.body", "body": last})
        except TimeoutError:
            logger.info("a client did not read its error: the connection is closed")


_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


def _too_large(limit: int) -> InvalidArgument:
    return BodyTooLarge.of("body", f"must be at most {limit} bytes")
