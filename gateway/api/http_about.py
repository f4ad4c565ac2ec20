"""HTTP endpoints about the gateway itself, which need no key: version, health, load, the API's description."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from common.version import VERSION
from gateway.api.openai_reply import dumps
from gateway.api.openapi import description
from gateway.intake.limits import Checker

_PAGES = Path(__file__).parent / "pages"
_PAGE_TYPES = {"docs.html": "text/html", "docs.js": "text/javascript", "docs.css": "text/css"}
_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class About:
    """The HTTP endpoints for probes, load balancers and people."""

    def __init__(
        self, ready: Callable[[], bool], num_requests: Callable[[], int], checker: Callable[[], Checker]
    ) -> None:
        """`ready` returns whether requests can be served, `num_requests` returns the number of current requests, and
        `checker` returns the model's current limits.
        """
        self._ready = ready
        self._num_requests = num_requests
        self._pages = {name: (_PAGES / name).read_bytes() for name in _PAGE_TYPES}
        self._checker = checker

    async def health(self, request: Request) -> Response:
        ready = self._ready()
        return json_response({"status": "ready" if ready else "waiting for workers"}, 200 if ready else 503)

    async def ping(self, request: Request) -> Response:
        """Answers health checks of SageMaker and others: an empty body with status 200 or 503."""
        return Response(status_code=200 if self._ready() else 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": VERSION})

    async def load(self, request: Request) -> Response:
        """Returns the number of requests that are running or waiting, in vLLM's format."""
        return json_response({"server_load": self._num_requests()})

    async def openapi(self, request: Request) -> Response:
        checker = self._checker()
        return json_response(description(checker.vocab_size, checker.max_model_len))

    async def docs(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        name = name if name in _PAGE_TYPES else "docs.html"
        return Response(self._pages[name], headers=_PAGE_HEADERS, media_type=_PAGE_TYPES[name])


def json_response(content: object, status: int = 200) -> Response:
    return Response(dumps(content), status, media_type="application/json")
