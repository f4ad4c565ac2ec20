"""Generates the OpenAPI description of the HTTP API from the bodies' types and rules and from the table of limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Any, get_args, get_type_hints

import msgspec

from common.version import VERSION
from gateway.api.body_fields import unsupported_of
from gateway.api.embedding_request import EmbeddingBody, ScoreBody
from gateway.api.field_rules import given
from gateway.api.messages_request import CountTokensBody, MessagesBody
from gateway.api.openai_request import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.api.openapi_limits import Served, limit_fields
from gateway.api.openapi_rules import add_rules
from gateway.api.responses_request import ResponsesBody

_PREFIX = "#/components/schemas/"
_WIRE = {(CompletionBody, "prompt"), (EmbeddingBody, "input")}
"""Fields whose form in JSON differs from the type that they are parsed into."""


@dataclass(frozen=True, slots=True)
class _Operation:
    path: str
    name: str
    what: str
    body: type[Body] | None = None
    example: Mapping[str, Any] | None = None
    streams: bool = False
    media_type: str = "application/json"
    with_key: bool = True
    methods: tuple[str, ...] = ("get",)
    parameter: str | None = None


_EITHER = ("prompt", "messages")
"""The fields of a /tokenize body of which exactly one must be given."""
_MESSAGES = [{"role": "user", "content": "Tell me a story"}]
_OPERATIONS = (
    _Operation(
        "/v1/completions", "createCompletion", "Continues prompts, as in OpenAI's API and vLLM.", CompletionBody,
        {"prompt": "Once upon a time", "max_tokens": 32}, streams=True,
    ),
    _Operation(
        "/v1/chat/completions", "createChatCompletion", "Answers a conversation.", ChatBody,
        {"messages": _MESSAGES, "max_tokens": 32}, streams=True,
    ),
    _Operation(
        "/v1/responses", "createResponse", "OpenAI's Responses API: answers an input. Nothing is stored.",
        ResponsesBody, {"input": "Tell me a story", "max_output_tokens": 32}, streams=True,
    ),
    _Operation(
        "/v1/messages", "createMessage", "Anthropic's Messages API: answers a conversation.", MessagesBody,
        {"messages": _MESSAGES, "max_tokens": 32}, streams=True,
    ),
    _Operation("/v1/messages/count_tokens", "countTokens", "Returns the length of a conversation in tokens.",
               CountTokensBody, {"messages": _MESSAGES}),
    _Operation("/v1/embeddings", "createEmbedding", "Returns the embeddings of texts.", EmbeddingBody,
               {"input": "Once upon a time"}),
    *(_Operation(path, name, "Returns how similar texts are: the cosine similarity of their embeddings.", ScoreBody,
                 {"text_1": "a wolf", "text_2": ["a fox", "a mill"]})
      for path, name in (("/score", "score"), ("/v1/score", "createScore"))),
    _Operation("/v1/models", "listModels", "Lists the model and the adapters that are served."),
    _Operation("/v1/models/{model}", "getModel", "Returns one model.", parameter="model"),
    _Operation("/v1/explain", "explainRequests", "Explains the caller's most recent requests."),
    _Operation("/v1/explain/{request_id}", "explainRequest", "Explains the caller's requests with the given id.",
               parameter="request_id"),
    _Operation("/tokenize", "tokenize", "Returns the token ids of a text or a conversation.", TokenizeBody,
               {"prompt": "Once upon a time"}),
    _Operation("/detokenize", "detokenize", "Returns the text of token ids.", DetokenizeBody, {"tokens": [11, 12]}),
    _Operation("/health", "health", "Returns 200 if requests can be served, and 503 otherwise.", with_key=False),
    _Operation("/ping", "ping", "Returns the status of /health with an empty body.", with_key=False, media_type="",
               methods=("get", "post")),
    _Operation("/load", "load", "Returns the number of requests that are running or waiting.", with_key=False),
    _Operation("/version", "version", "Returns the server's version.", with_key=False),
)  # fmt: skip


@cache
def description(served: Served) -> dict[str, Any]:
    """Returns the OpenAPI document for a model and its workers."""
    bodies = list(dict.fromkeys(operation.body for operation in _OPERATIONS if operation.body is not None))
    _, components = msgspec.json.schema_components(
        [_wire_type(body) for body in bodies], ref_template=_PREFIX + "{name}"
    )
    for component in components.values():
        limit_fields(component, served)
    for body in bodies:
        _complete(components[_name(body)], body, served)
    add_rules(components, {_name(body): body for body in bodies}, served)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Looseleaf",
            "version": VERSION,
            "description": "OpenAI's HTTP API with vLLM's additions, and part of Anthropic's API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {operation.path: _path(operation) for operation in _OPERATIONS},
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _name(body: type[Body]) -> str:
    return body.__name__.removesuffix("Body") + "Request"


def _wire_type(body: type[Body]) -> type[msgspec.Struct]:
    """Returns a type with a body's fields for which msgspec can generate a schema."""
    hints = get_type_hints(body, include_extras=True)
    required = {field.name for field in msgspec.structs.fields(body) if field.required}
    fields: list[Any] = []
    for name in body.__struct_fields__:
        kind = Any if (body, name) in _WIRE else _without_raw(hints[name])
        fields.append((name, kind) if name in required else (name, kind, None))
    return msgspec.defstruct(_name(body), fields, kw_only=True)


@cache
def _without_raw(kind: Any) -> Any:
    """Returns the type of a field, with `Any` in place of `msgspec.Raw`, for which msgspec cannot generate a schema."""
    if isinstance(kind, UnionType):
        return reduce(or_, map(_without_raw, get_args(kind)))
    if kind is msgspec.Raw:
        return Any
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return kind
    hints = get_type_hints(kind)
    if msgspec.Raw not in hints.values() and not any(_without_raw(hint) != hint for hint in hints.values()):
        return kind
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        found = (field.name, _without_raw(hints[field.name]))
        fields.append(found if field.required else (*found, None))
    strict = kind.__struct_config__.forbid_unknown_fields
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=strict, kw_only=True)


def _complete(schema: dict[str, Any], body: type[Body], served: Served) -> None:
    """Adds the forms of the prompts, the ignored fields and the unsupported fields to a body's schema."""
    properties = schema["properties"]
    for name in [name for kind, name in _WIRE if kind is body]:
        properties[name] = served.prompt
    if body is DetokenizeBody:
        ids = {"type": "array", "items": served.ids["items"]}  # may be longer than a prompt
        properties["tokens"] = {**ids, "description": "At most as many ids as the longest accepted text has bytes."}
    if body is TokenizeBody:
        schema["anyOf"] = [given(name).schema for name in _EITHER]
    for name in sorted(body.ignored.difference(properties)):
        properties[name] = {"description": "Accepted and ignored."}
    for name, nothing in unsupported_of(body).items():
        what = "Not supported: only the neutral value is accepted."
        properties[name] = {"enum": [None] if nothing is None else [None, nothing], "description": what}
    schema.pop("title", None)


def _path(operation: _Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.what,
        "responses": _answers(operation),
        "security": [{"key": []}, {}] if operation.with_key else [],
    }
    if operation.parameter is not None:
        described["parameters"] = [
            {"name": operation.parameter, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if operation.body is None:
        names = {method: method.capitalize() if method != "get" else "" for method in operation.methods}
        return {method: {**described, "operationId": operation.name + suffix} for method, suffix in names.items()}
    content = {"schema": {"$ref": _PREFIX + _name(operation.body)}, "example": operation.example}
    described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return {"post": described}


def _answers(operation: _Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": {"type": "object"}}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {}}
    body = {"content": content} if operation.media_type else {}
    answers: dict[str, Any] = {"200": {"description": "The answer.", **body}}
    if not operation.with_key:
        if operation.path in ("/health", "/ping"):
            answers["503"] = {"description": "Requests cannot be served now.", **body}
        return answers
    statuses = _ERRORS if operation.body is not None else {name: _ERRORS[name] for name in ("401", "404", "429")}
    error = {"application/json": {"schema": {"$ref": _PREFIX + "Error"}}}
    return answers | {status: {"description": what, "content": error} for status, what in statuses.items()}


_ERRORS = {
    "400": "A field is wrong or not supported; `param` names it.",
    "401": "The key is missing or wrong.",
    "404": "The model is not served here.",
    "408": "The request did not arrive in time.",
    "413": "The body is too large.",
    "429": "The queue is full or a quota is used up; see Retry-After.",
    "500": "The service failed.",
    "503": "No worker is ready, or the gateway is shutting down; see Retry-After.",
    "504": "The request took too long.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The first field that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
