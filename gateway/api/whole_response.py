"""Sends a complete answer to a client, and limits how long the answer stays in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.errors import Cancelled, LooseleafError
from gateway.api.asgi import OnError, abort, while_connected

logger = logging.getLogger("http")
PIECE_BYTES = 64 << 10


class WholeResponse(Response):
    """A JSON response whose request counts as running until the client has read the answer, except for at most
    `PIECE_BYTES` that the connection holds. If the client reads too slowly, the connection is aborted.
    """

    def __init__(
        self,
        content: bytes,
        in_time: Callable[[], AbstractAsyncContextManager[None]],
        on_error: OnError,
        at_end: ExitStack,
    ) -> None:
        """`in_time` returns a context manager that raises a LooseleafError when sending takes too long. `at_end` is
        closed when the response ends.
        """
        super().__init__(content, media_type="application/json")
        self._in_time = in_time
        self._on_error = on_error
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._at_end:
            if len(self.body) <= PIECE_BYTES:
                return await super().__call__(scope, receive, send)
            try:
                await while_connected(receive, self._send(scope, send))
            except Cancelled:
                logger.debug("a client has disconnected")

    async def _send(self, scope: Scope, send: Send) -> None:
        try:
            async with self._in_time():
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                for start in range(0, len(self.body), PIECE_BYTES):  # the server waits for the client before each piece
                    piece = self.body[start : start + PIECE_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body"})
        except LooseleafError as error:
            self._on_error(error)
            logger.info("%s; the connection is closed", error.message)
            await abort(scope)
