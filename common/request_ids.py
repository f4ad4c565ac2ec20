"""The ids of requests. A client may choose the id of its request; a long id is truncated, and characters that are not
allowed are removed from it. The log lines of a request's task contain the id.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

HEADER = "x-request-id"
"""The HTTP header and the gRPC metadata key."""
MAX_ID_CHARS = 128
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that the current task is handling; "" if there is none."""
_FOREIGN = re.compile(r"[^A-Za-z0-9._:/+=@-]")


def is_request_id(text: str) -> bool:
    """Returns whether all characters of an id are allowed."""
    return _FOREIGN.search(text) is None


def take_request_id(given: str | None) -> str:
    """Returns the allowed characters (letters, digits and ._:/+=@-) among the first 128 of a client's id, or a new id
    if there are none. Makes the result the current task's id.
    """
    request_id = _FOREIGN.sub("", (given or "")[:MAX_ID_CHARS]) or new_request_id()
    REQUEST_ID.set(request_id)
    return request_id


def new_request_id() -> str:
    return "gen-" + secrets.token_hex(12)
