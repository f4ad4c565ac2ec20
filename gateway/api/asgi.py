"""Provides building blocks of the HTTP endpoints: bounded bodies, event streams, errors as JSON, and the detection of
clients that disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import Cancelled, DeadlineExceeded, Internal, InvalidArgument, LooseleafError
from gateway.api.answer import StreamForm
from gateway.api.openai_reply import dumps, error_body
from gateway.request.outlet import LAST_WORD_S

logger = logging.getLogger("http")
T = TypeVar("T")
BODY_TIMEOUT_S = 30.0
SERVER_SEND = "looseleaf.send"
ABORT = "looseleaf.abort"
"""The key of a scope's function that closes the connection and discards what has not been sent."""
OnError = Callable[[LooseleafError], None]
ContentOf = Callable[[LooseleafError], Mapping[str, Any]]
Endpoint = Callable[[Request], Awaitable[Response]]


class BodyTooLarge(InvalidArgument):
    http_status = 413


class BodyTooSlow(DeadlineExceeded):
    http_status = 408


def error_response(error: LooseleafError, content: Mapping[str, Any] | None = None) -> Response:
    """Returns the HTTP response for an error. `content` is the response's body; the default is OpenAI's error
    object.
    """
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = retry_after(error.retry_after_s)
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    body = error_body(error) if content is None else content
    return Response(dumps(body), error.http_status, headers, "application/json")


def retry_after(seconds: float) -> str:
    """Returns the value of the Retry-After header, whole seconds after which the client is not refused again."""
    return str(max(1, math.ceil(seconds)))


def expected(error: Exception) -> LooseleafError:
    """Returns the error that a client receives for an exception. Logs the exception if it is unexpected."""
    if isinstance(error, LooseleafError):
        return error
    logger.error("unexpected failure in a handler", exc_info=error)
    return Internal("the service failed; its log says why")


def guarded(endpoint: Endpoint, on_error: OnError, content_of: ContentOf = error_body) -> Endpoint:
    """Wraps an endpoint so that its exceptions become responses with the body that `content_of` returns. `on_error` is
    called with each error.
    """

    @functools.wraps(endpoint)
    async def run(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            known = expected(error)
            on_error(known)
            return error_response(known, content_of(known))

    return run


async def read_body(request: Request, limit: int, take: Callable[[int], None]) -> bytearray:
    """Reads the body. `take` is called with each chunk's size and may raise an error to refuse the chunk.

    Raises BodyTooLarge above `limit` bytes, BodyTooSlow after `BODY_TIMEOUT_S`, Cancelled if the client disconnects,
    and the errors of `take`.
    """
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
        raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client has disconnected") from None
    return body


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects, cancels `work` and raises Cancelled. The body must have
    been read.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client has disconnected")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def joined(pieces: Iterable[bytes]) -> bytes:
    """Returns the pieces of an answer as one. Lets other tasks run before each piece is created."""
    taken = []
    for piece in pieces:
        taken.append(piece)
        await asyncio.sleep(0)
    return b"".join(taken)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def with_server_send(app: ASGIApp) -> ASGIApp:
    """Wraps `app` to put the server's own `send` into the scope, because the wrappers that Starlette puts around `send`
    cost time for every message.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVER_SEND] = send
        await app(scope, receive, send)

    return run


class EventSender:
    """A sender of server-sent events to one client. The headers are sent with the first event, so an earlier error can
    have its own status.
    """

    __slots__ = ("_direct", "_send", "started")

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._direct: Send = scope.get(SERVER_SEND, send)
        self.started = False

    def send(self, events: bytes) -> Awaitable[None]:
        message = {"type": "http.response.body", "body": events, "more_body": True}
        return self._direct(message) if self.started else self._start(message)

    async def _start(self, first: Message) -> None:
        self.started = True
        await self._send(_STREAM_START)
        await self._direct(first)


async def abort(scope: Scope) -> None:
    """Closes the connection and discards what has not been sent. Must be called in the work of `while_connected`, which
    then ends.
    """
    scope[ABORT]()
    await asyncio.sleep(LAST_WORD_S)


def in_turn(send: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns a `send` that several outlets of one client can share. It sends for one outlet at a time."""
    turn = asyncio.Lock()

    async def send_in_turn(events: bytes) -> None:
        async with turn:
            await send(events)

    return send_in_turn


class EventStream(Response):
    """A response of server-sent events that `work` sends. `work` is cancelled when the client disconnects."""

    def __init__(
        self,
        work: Callable[[EventSender], Awaitable[None]],
        form: StreamForm,
        on_error: OnError,
        at_end: contextlib.ExitStack,
    ) -> None:
        """`form` defines how the stream ends. `at_end` is closed when the response ends."""
        self._form = form
        self._work = work
        self._on_error = on_error
        self._at_end = at_end
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._at_end:
                await while_connected(receive, self._serve(scope, receive, send))
        except Cancelled:
            logger.debug("a client has disconnected")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = EventSender(scope, send)
        try:
            await self._work(sender)
        except Exception as failure:
            error = expected(failure)
        else:
            await send({"type": "http.response.body", "body": self._form.ending})
            return
        self._on_error(error)
        try:
            async with asyncio.timeout(LAST_WORD_S):
                if not sender.started:
                    await error_response(error, self._form.error_object(error))(scope, receive, send)
                    return
                await send({"type": "http.response.body", "body": self._form.failure(error)})
        except TimeoutError:
            logger.info("a client did not read its error message; the connection is closed")
            await abort(scope)


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
