"""Adds a request id, warnings and CORS headers to HTTP answers."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import StartupError
from common.request_ids import HEADER, take_request_id
from common.tracing import CURRENT, TraceContext

WARNING_HEADER = "x-looseleaf-warning"
WARNINGS = "looseleaf.warnings"
"""The key of a scope's warnings, which are sent with the answer's headers."""
MAX_WARNING_CHARS = 1000
CORS_MAX_AGE_S = 600


def warn(scope: Scope, text: str) -> None:
    """Adds a warning to the answer to a request. The answer's headers must not have been sent yet."""
    scope.setdefault(WARNINGS, []).append(text)


def framed(app: ASGIApp, origins: Sequence[str] = ()) -> ASGIApp:
    """Wraps `app` so that it accepts request ids and trace contexts, and returns request ids and warnings. Web pages of
    `origins` may read the answers of `app`.
    """
    if origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(HEADER, WARNING_HEADER, "retry-after"),
            max_age=CORS_MAX_AGE_S,
        )

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == HEADER.encode()), b"")
        request_id = take_request_id(given.decode("latin-1")).encode()
        CURRENT.set(TraceContext.of_headers(scope["headers"]))

        async def send_framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (HEADER.encode(), request_id)]
                if texts := scope.get(WARNINGS):
                    headers.append((WARNING_HEADER.encode(), _header_value("; ".join(texts))))
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_framed)

    return run


def _header_value(text: str) -> bytes:
    shown = "".join(char if " " <= char <= "~" else "?" for char in text[:MAX_WARNING_CHARS])
    return shown.encode("ascii")


def read_origins(given: str | None) -> tuple[str, ...]:
    """Returns the origins in a comma-separated list, such as "https://a.example,http://localhost:3000". "*" means any
    origin. Raises StartupError for text that is not an origin.
    """
    origins = tuple(item.strip() for item in (given or "").split(",") if item.strip())
    for origin in origins:
        parts = urlsplit(origin)
        is_origin = parts.scheme in ("http", "https") and parts.netloc and origin == f"{parts.scheme}://{parts.netloc}"
        if origin != "*" and not is_origin:
            raise StartupError(f"--allowed-origins: {origin[:100]!r} is not an origin such as https://app.example")
    return origins
