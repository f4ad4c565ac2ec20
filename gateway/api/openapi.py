"""The OpenAPI description of the HTTP API, generated from the types that parse the bodies and the table of limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from common.version import VERSION
from gateway.api.body_fields import unsupported_of
from gateway.api.openai_request import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.api.responses_request import ResponsesBody
from gateway.intake.limits import MAX_STOP_STRINGS, RANGES

_PREFIX = "#/components/schemas/"
_IDS = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {**_IDS, "minItems": 1},
        {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1},
    ],
    "description": "A text, texts, token ids or lists of token ids.",
}
_WIRE: Mapping[tuple[type[Body], str], Mapping[str, Any]] = {(CompletionBody, "prompt"): _PROMPT}
"""Fields whose form in JSON differs from the type that they are parsed into."""
_STOP = f"At most {MAX_STOP_STRINGS} strings, not empty."


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
    parameter: str | None = None


_MESSAGES = [{"role": "user", "content": "Tell me a story"}]
_OPERATIONS = (
    _Operation(
        "/v1/completions", "createCompletion", "Continues prompts, as OpenAI's API and vLLM do.", CompletionBody,
        {"prompt": "Once upon a time", "max_tokens": 32}, streams=True,
    ),
    _Operation(
        "/v1/chat/completions", "createChatCompletion", "Answers a conversation.", ChatBody,
        {"messages": _MESSAGES, "max_tokens": 32}, streams=True,
    ),
    _Operation(
        "/v1/responses", "createResponse", "Answers an input by OpenAI's Responses API. Nothing is stored.",
        ResponsesBody, {"input": "Tell me a story", "max_output_tokens": 32}, streams=True,
    ),
    _Operation("/v1/models", "listModels", "Lists the model that is served."),
    _Operation("/v1/models/{model}", "getModel", "Returns one model.", parameter="model"),
    _Operation("/tokenize", "tokenize", "Returns the token ids of a text or a conversation.", TokenizeBody,
               {"prompt": "Once upon a time"}),
    _Operation("/detokenize", "detokenize", "Returns the text of token ids.", DetokenizeBody, {"tokens": [11, 12]}),
    _Operation("/health", "health", "Says whether requests can be served: 200 or 503.", with_key=False),
    _Operation("/ping", "ping", "Says the same with an empty body.", with_key=False, media_type="text/plain"),
    _Operation("/load", "load", "Returns how many requests run or wait.", with_key=False),
    _Operation("/version", "version", "Returns the server's version.", with_key=False),
)  # fmt: skip


def description() -> dict[str, Any]:
    """Returns the OpenAPI document."""
    bodies = [operation.body for operation in _OPERATIONS if operation.body is not None]
    _, components = msgspec.json.schema_components(
        [_wire_type(body) for body in bodies], ref_template=_PREFIX + "{name}"
    )
    for body in bodies:
        _complete(components[_name(body)], body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Looseleaf",
            "version": VERSION,
            "description": "OpenAI's HTTP API with vLLM's additions, served by Looseleaf.",
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
    """Returns a type with a body's fields, as msgspec describes them."""
    hints = get_type_hints(body, include_extras=True)
    required = {field.name for field in msgspec.structs.fields(body) if field.required}
    fields: list[Any] = []
    for name in body.__struct_fields__:
        kind = Any if (body, name) in _WIRE else hints[name]
        fields.append((name, kind) if name in required else (name, kind, None))
    return msgspec.defstruct(_name(body), fields, kw_only=True)


def _complete(schema: dict[str, Any], body: type[Body]) -> None:
    """Adds to a body's schema the limits, and the fields that are only tolerated."""
    properties = schema["properties"]
    for (kind, name), wire in _WIRE.items():
        if kind is body:
            properties[name] = dict(wire)
    for name, limit in RANGES.items():
        for option in _numbers(properties.get(name, {})):
            option |= {"exclusiveMinimum" if limit.above_low else "minimum": limit.low, "maximum": limit.high}
    if "stop" in properties:
        properties["stop"]["description"] = _STOP
    for name in sorted(body.ignored.difference(properties)):
        properties[name] = {"description": "Accepted and ignored."}
    for name, nothing in unsupported_of(body).items():
        what = "Not supported: only the value that asks for nothing is taken."
        properties[name] = {"enum": [None] if nothing is None else [None, nothing], "description": what}
    schema.pop("title", None)


def _numbers(schema: dict[str, Any]) -> list[dict[str, Any]]:
    options = [schema, *schema.get("anyOf", ())]
    return [option for option in options if option.get("type") in ("integer", "number")]


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
        return {"get": described}
    content = {"schema": {"$ref": _PREFIX + _name(operation.body)}, "example": operation.example}
    described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return {"post": described}


def _answers(operation: _Operation) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {"schema": _answer_schema(operation)}}
    if operation.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answers = {"200": {"description": "The answer.", "content": content}}
    if not operation.with_key:
        if operation.path in ("/health", "/ping"):
            answers["503"] = {"description": "Requests cannot be served now.", "content": content}
        return answers
    statuses = _ERRORS if operation.body is not None else {name: _ERRORS[name] for name in ("401", "404", "429")}
    error = {"application/json": {"schema": {"$ref": _PREFIX + "Error"}}}
    return answers | {status: {"description": what, "content": error} for status, what in statuses.items()}


def _answer_schema(operation: _Operation) -> dict[str, Any]:
    return {"type": "object"} if operation.media_type == "application/json" else {"type": "string"}


_ERRORS = {
    "400": "A field is wrong or not supported; `param` names it.",
    "401": "The key is missing or wrong.",
    "404": "The model is not served here.",
    "408": "The request's headers did not arrive in time.",
    "413": "The body is too large.",
    "429": "The queue is full or a quota is used up; see Retry-After.",
    "500": "The service failed.",
    "503": "No worker is ready, or the gateway shuts down; see Retry-After.",
    "504": "The time was over.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The first field that is wrong."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
