"""Serves the HTTP endpoints that explain a tenant's recent requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidArgument, NotFound
from gateway.api.http_about import json_response
from gateway.request.explanations import Explanations
from protos.v1 import inference_pb2 as pb

DEFAULT_LIMIT = 100


class ExplainApi:
    """The endpoints /v1/explain and /v1/explain/{request_id}. A caller sees only requests of its own tenant."""

    def __init__(self, explanations: Explanations, tenant_of: Callable[[Request], str]) -> None:
        self._explanations = explanations
        self._tenant_of = tenant_of

    async def recent(self, request: Request) -> Response:
        """Returns the explanations of the tenant's most recent requests, or of the requests with the id in the path."""
        tenant, limit = self._tenant_of(request), request.query_params.get("limit", str(DEFAULT_LIMIT))
        if not limit.isascii() or not limit.isdigit() or len(limit) > 9:
            raise InvalidArgument.of("limit", f"must be an integer, got {limit[:20]!r}")
        found = explain(self._explanations, tenant, request.path_params.get("request_id"), int(limit))
        return json_response({"object": "list", "data": [as_json(one) for one in found.explanations]})


def explain(explanations: Explanations, tenant: str, request_id: str | None, limit: int) -> pb.ExplainResponse:
    """Returns the explanations of a tenant's requests, newest first. Raises NotFound if no request has the id, and
    InvalidArgument for a limit below 1.
    """
    if limit < 1:
        raise InvalidArgument.of("limit", "must be at least 1")
    found = explanations.find(tenant, request_id, limit)
    if request_id is not None and not found:
        raise NotFound(
            f"no request of yours has the id {request_id[:128]!r}; "
            f"the gateway keeps at most {explanations.most} explanations (explain_requests)"
        )
    return pb.ExplainResponse(explanations=[one.snapshot() for one in found])


def as_json(message: Message) -> dict[str, Any]:
    """Returns a message as a JSON object. Its keys are the proto's field names, and numbers stay numbers. The object
    has all fields except optional fields and messages that are absent. Values of enums are in lower case, without their
    prefix.
    """
    return {
        field.name: _value(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _value(field: Any, value: Any) -> Any:
    return [_one(field, item) for item in value] if field.is_repeated else _one(field, value)


def _one(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return as_json(value)
    return value if field.enum_type is None else _enum_name(field.enum_type, value)


def _enum_name(kind: Any, value: int) -> str:
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(kind.values_by_number[value].name.removeprefix(prefix).lower())
