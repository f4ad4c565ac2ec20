"""Rules for bodies that Python types do not express: the values of a `type` or a role, and the fields of each `type`.

The modules that convert the bodies check these rules (`chat_messages`, `responses_input`, `messages_history`, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api import messages_history, responses_input
from gateway.api.chat_fields import EFFORTS

_FORMATS = ("text", "json_object", "json_schema")
_VALUES: Mapping[tuple[str, str], Sequence[str]] = {
    ("ContentPart", "type"): ("text",),
    ("ToolCall", "type"): ("function",),
    ("ResponseFormat", "type"): _FORMATS,
    ("TextFormat", "type"): _FORMATS,
    ("OutputFormat", "type"): _FORMATS,
    ("Thinking", "type"): ("disabled",),
    ("ToolUse", "type"): ("auto", "any", "tool", "none"),
    ("TurnBody", "role"): messages_history.ROLES,
    ("InputPart", "type"): (*responses_input.TEXT_PARTS, "reasoning_text"),
    ("Reasoning", "effort"): EFFORTS,
    ("OutputConfig", "effort"): EFFORTS,
}
_NEEDS: Sequence[tuple[str, str, str]] = (
    ("CompletionRequest", "stream_options", "stream"),
    ("ChatRequest", "stream_options", "stream"),
    ("ChatRequest", "top_logprobs", "logprobs"),
)
"""Triples of a component, a field, and the field that must be true if the first field is given."""
_EXCLUSIVE = (("ChatRequest", "max_tokens", "max_completion_tokens"),)
"""Triples of a component and two fields, of which only one may be given."""
_REFUSED = (("ChatRequest", "chat_template"), ("TokenizeRequest", "chat_template"))
"""Pairs of a component and a field that is read only to refuse it with a specific error."""
_STRING = {"type": "string"}
_NAME = {"type": "string", "minLength": 1}
_GIVEN = {"not": {"type": "null"}}
_ARGUMENTS = {"type": "string", "description": "A JSON object, as text."}
_TEXT = {"anyOf": [_STRING, {"type": "array", "items": {"$ref": "#/components/schemas/InputPart"}}]}


def _shape(kind: str | None, **needs: Any) -> dict[str, Any]:
    """Returns the schema of an object that has the fields `needs` and, unless `kind` is None, `kind` as its `type`."""
    typed = {} if kind is None else {"type": {"const": kind}}
    return {"type": "object", "properties": typed | needs, "required": [*typed, *needs]}


_SHAPES: Mapping[str, Sequence[dict[str, Any]]] = {
    "ContentPart": [_shape(None, text=_STRING)],
    "InputPart": [_shape(None, text=_STRING)],
    "ResponseFormat": [
        _shape("text"), _shape("json_object"), _shape("json_schema", json_schema=_shape(None, schema=_GIVEN)),
    ],
    "TextFormat": [_shape("text"), _shape("json_object"), _shape("json_schema", schema=_GIVEN)],
    "OutputFormat": [_shape("text"), _shape("json_object"), _shape("json_schema", schema=_GIVEN)],
    "ToolUse": [_shape("auto"), _shape("none"), _shape("any"), _shape("tool", name=_NAME)],
    "InputItem": [
        {
            "properties": {"type": {"const": "message"}},  # the default type
            "allOf": [_shape(None, role={"enum": list(responses_input.ROLES)}, content=_TEXT)],
        },
        _shape("reasoning"),
        _shape("function_call", call_id=_NAME, name=_NAME, arguments=_ARGUMENTS),
        _shape("function_call_output", call_id=_NAME, output=_TEXT),
    ],
    "ContentBlock": [
        _shape("text", text=_STRING),
        _shape("tool_use", id=_STRING, name=_STRING),
        _shape("tool_result", tool_use_id=_STRING),
        _shape("thinking"),
        _shape("redacted_thinking"),
    ],
    "MessageBody": [
        _shape(None, content=_GIVEN),
        _shape(None, role={"const": "assistant"}, tool_calls={"type": "array", "minItems": 1}),
    ],
}  # fmt: skip
"""The alternative schemas of each component's objects."""


def add_rules(components: Mapping[str, dict[str, Any]]) -> None:
    """Adds the rules to the schemas of the components."""
    for (name, field), values in _VALUES.items():
        properties = components[name]["properties"]
        for option in (properties[field], *properties[field].get("anyOf", ())):
            if option.get("type") == "string":
                option["enum"] = list(values)
    for name, shapes in _SHAPES.items():
        components[name] |= {"anyOf": list(shapes)} if len(shapes) > 1 else {"allOf": list(shapes)}
    for name, field, other in _NEEDS:
        is_true = {"required": [other], "properties": {other: {"const": True}}}
        components[name].setdefault("allOf", []).append({"anyOf": [{"not": _given(field)}, is_true]})
    for name, *fields in _EXCLUSIVE:
        components[name].setdefault("allOf", []).append({"not": {"allOf": [_given(field) for field in fields]}})
    for name, field in _REFUSED:
        components[name]["properties"][field] = {"type": "null", "description": "Not supported."}


def _given(field: str) -> dict[str, Any]:
    """Returns the schema of an object in which a field has a value other than null."""
    return {"required": [field], "properties": {field: _GIVEN}}
