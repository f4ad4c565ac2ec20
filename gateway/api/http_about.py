"""Serves the HTTP endpoints about the gateway itself, which need no key: version, health, load, and the description of
the API.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from common.version import VERSION
from gateway.api.front import Front
from gateway.api.openai_reply import dumps
from gateway.api.openapi import description
from gateway.api.openapi_limits import Served
from gateway.intake.group_limits import most_sequences

_PAGES = Path(__file__).parent / "pages"
_PAGE_TYPES = {"docs.html": "text/html", "docs.js": "text/javascript", "docs.css": "text/css"}


class About:
    """The HTTP endpoints that describe the gateway to probes, load balancers and users."""

    def __init__(
        self, ready: Callable[[], bool], num_requests: Callable[[], int], served: Callable[[], Served]
    ) -> None:
        """`ready` returns whether requests can be served, `num_requests` returns the number of current requests, and
        `served` returns the properties of the model and its workers on which the limits of requests depend.
        """
        self._ready = ready
        self._num_requests = num_requests
        self._pages = {name: (_PAGES / name).read_bytes() for name in _PAGE_TYPES}
        self._served = served

    async def health(self, request: Request) -> Response:
        ready = self._ready()
        return json_response({"status": "ready" if ready else "waiting for workers"}, 200 if ready else 503)

    async def ping(self, request: Request) -> Response:
        """Answers health checks, such as SageMaker's, with an empty body and status 200 or 503."""
        return Response(status_code=200 if self._ready() else 503)

    async def version(self, request: Request) -> Response:
        return json_response({"version": VERSION})

    async def load(self, request: Request) -> Response:
        """Returns the number of requests that are running or waiting, in vLLM's format."""
        return json_response({"server_load": self._num_requests()})

    async def openapi(self, request: Request) -> Response:
        return json_response(description(self._served()))

    async def docs(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        name = name if name in _PAGE_TYPES else "docs.html"
        return Response(self._pages[name], headers=page_headers(), media_type=_PAGE_TYPES[name])


def served_by(front: Front) -> Served:
    """Returns the current properties of the model and its workers on which the limits in /openapi.json depend."""
    validator, planner = front.validator, front.planner
    checker, most = validator.checker(), most_sequences(validator.group_rooms())
    return Served(
        checker.vocab_size,
        checker.max_model_len,
        **({} if most is None else {"max_sequences": most}),
        dimensions=front.assets.hidden_size,
        reads_tools=planner.reads_tools,
        writes_calls=planner.writes_calls,
        calls_tools=planner.reads_tools and planner.formats.calls is not None,
    )


def page_headers(*, images: bool = False) -> dict[str, str]:
    """Returns the headers of a page that loads resources only from this server and has no inline scripts or styles. The
    page may load images if `images` is set.
    """
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy + ("; img-src 'self'" if images else ""),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }


def json_response(content: object, status: int = 200) -> Response:
    return Response(dumps(content), status, media_type="application/json")
