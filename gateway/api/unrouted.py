"""Answers HTTP requests for which there is no endpoint."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from common.errors import NotFound, Unimplemented
from gateway.api.asgi import error_response


class MethodNotAllowed(Unimplemented):
    http_status, own_code = 405, "method_not_allowed"


async def unrouted(request: Request, error: Exception) -> Response:
    """Returns the error for a request without an endpoint: status 405 if the path has endpoints for other methods, and
    404 otherwise.
    """
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = error_response(MethodNotAllowed(f"there is no {asked} here, only {allowed}"))
        response.headers["allow"] = allowed
    else:
        response = error_response(NotFound(f"there is no {asked} here"))
    response.status_code = error.status_code
    return response
