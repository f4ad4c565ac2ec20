"""Limits HTTP connections before the client is identified: the size of the request head, the time until the head is
complete, and the number of connections.

uvicorn limits neither the size of a head nor the time until it is complete, and it limits connections only after it has
parsed a head. Refusals have the format of OpenAI's errors.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import DeadlineExceeded, InvalidArgument, LooseleafError, Unavailable
from common.request_ids import HEADER, new_request_id
from gateway.api.asgi import ABORT, retry_after
from gateway.api.openai_reply import dumps, error_body
from gateway.intake.limits import MAX_BODY_BYTES

SURPLUS = 64
"""Number of connections above the limit that get an error if they send data. Further connections are closed at once."""
SURPLUS_S = 1.0
MAX_DISCARDED_BYTES = 2 * MAX_BODY_BYTES
"""The number of bytes of a body that are read and discarded after its request has been answered. If there are more, the
connection is closed.
"""


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """The limits on connections, which are the same for all clients."""

    connections: int = 4096
    head_bytes: int = 64 << 10
    """Limit in bytes on the request line and the headers."""
    head_s: float = 10.0
    """Limit in seconds from the start of a connection, or the first byte of a request, to the end of the headers."""
    keep_alive_s: int = 75
    """Limit in seconds on the time between two requests."""


DEFAULT_BOUNDS = HttpBounds()


class HeadTooLarge(InvalidArgument):
    http_status = 431


class HeadTooSlow(DeadlineExceeded):
    http_status = 408


class BoundedHttp(HttpToolsProtocol):
    """A subclass of uvicorn's HTTP protocol that enforces `HttpBounds`."""

    def __init__(self, bounds: HttpBounds, **parts: Any) -> None:
        super().__init__(**parts)
        self._bounds = bounds
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._discarded = 0
        self._surplus = self._refused = False

    # --- asyncio's callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        above = len(self.connections) - self._bounds.connections
        if above > SURPLUS:
            transport.abort()
            return
        self._surplus = above > 0
        self._expect_head(SURPLUS_S if self._surplus else self._bounds.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._surplus:
            limit = self._bounds.connections
            self._refuse(Unavailable(f"the limit is {limit} connections (max_connections)", retry_after_s=1.0))
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._bounds.head_bytes:
            self._refuse(self._too_large())
        elif self._in_head and self._head_timer is None and not self._is_answering():
            self._expect_head(self._bounds.head_s)

    # --- the parser's callbacks

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._in_head, self._head_bytes = False, 0
        self._forget_head_timer()
        if size > self._bounds.head_bytes:
            self._refuse(self._too_large())
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.transport.close()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes, self._discarded = True, 0, 0
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidArgument("the request is not valid HTTP"))

    # --- refusing

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(f"the request line and headers must be at most {self._bounds.head_bytes} bytes")

    def _expect_head(self, seconds: float) -> None:
        self._head_timer = self.loop.call_later(seconds, self._head_is_late)

    def _forget_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._head_bytes and not self._surplus:
            self._refuse(HeadTooSlow(f"the headers did not arrive within {self._bounds.head_s:g} s"))
        elif not self._is_answering():
            self.transport.close()

    def _refuse(self, error: LooseleafError) -> None:
        """Answers with an error and closes the connection. If another answer is being written, only closes the
        connection.
        """
        self._refused = True
        self._forget_head_timer()
        if self.transport.is_closing():
            return
        if not self._is_answering():
            content = dumps(error_body(error))
            retry = "" if error.retry_after_s is None else f"retry-after: {retry_after(error.retry_after_s)}\r\n"
            head = (
                f"HTTP/1.1 {error.http_status} {HTTPStatus(error.http_status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\n{retry}connection: close\r\n"
                f"{HEADER}: {new_request_id()}\r\n\r\n"
            )
            self.transport.write(head.encode() + content)
        self.transport.close()
