"""Adds to /openapi.json the rules of the bodies that neither types nor limits express: the values of a `type` or a
role, the fields that each type needs, and the fields that cannot be combined.

The bodies' own rules come from their classes. The modules that convert the bodies check the shapes (`chat_messages`,
`responses_input`, `messages_history`, ...), and `gateway.intake` checks `_CHECKED_LATER`, also for gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from gateway.api import messages_history, responses_input
from gateway.api.chat_fields import EFFORTS
from gateway.api.field_rules import NOT_NULL, both, has
from gateway.api.messages_request import CountTokensBody
from gateway.api.openai_request import Body, ChatBody, SamplingBody, TokenizeBody
from gateway.api.openapi_limits import Schema, Served, options_of
from gateway.api.responses_request import WITHOUT_EFFECT, ResponsesBody
from gateway.api.structured_fields import FORMATS, KINDS, STRUCTURED_FIELDS
from gateway.api.tool_choice import CHOICES, FUNCTION_NAME
from gateway.intake.group_limits import NEUTRAL
from gateway.intake.limits import MAX_TOOLS, RANGES

_VALUES: Mapping[tuple[str, str], Sequence[Any]] = {
    ("ContentPart", "type"): ("text",),
    ("ToolCall", "type"): ("function",),
    ("ResponseFormat", "type"): FORMATS,
    ("TextFormat", "type"): FORMATS,
    ("OutputFormat", "type"): FORMATS,
    ("Thinking", "type"): ("disabled",),
    ("TurnBody", "role"): tuple(messages_history.BLOCKS),
    ("InputPart", "type"): (*responses_input.TEXT_PARTS, responses_input.REASONING_PART),
    ("Reasoning", "effort"): EFFORTS,
    ("OutputConfig", "effort"): EFFORTS,
    ("ChatRequest", "reasoning_effort"): EFFORTS,
    ("ResponsesRequest", "include"): WITHOUT_EFFECT,
}
_ONLY: Mapping[tuple[str, str], Sequence[Any]] = {
    ("CompletionRequest", "early_stopping"): (None, True, False, "never"),
    ("ChatRequest", "early_stopping"): (None, True, False, "never"),
    ("ResponsesRequest", "previous_response_id"): (None,),
}
"""The accepted values of fields whose types would allow other values."""
_PARTS = "#/components/schemas/InputPart"
_STRING = {"type": "string"}
_NAME = {"type": "string", "minLength": 1}
_ARGUMENTS = {"type": "string", "description": "A JSON object, as text."}
_SCHEMA = {
    "anyOf": [{"type": ["object", "boolean"]}, {"type": "string", "pattern": r"\S"}],
    "description": "A JSON schema, or a string that contains one.",
}
_OPTIONAL_SCHEMA = {**_SCHEMA, "anyOf": [{"type": "null"}, *_SCHEMA["anyOf"]]}


def _parts(*kinds: str) -> Schema:
    """Returns the schema of a list of parts of these types."""
    typed = {"type": "object", "properties": {"type": {"enum": list(kinds)}}}
    return {"type": "array", "items": {"allOf": [{"$ref": _PARTS}, typed]}}


_TEXT = {"anyOf": [_STRING, _parts(*responses_input.TEXT_PARTS)]}
_OPTIONAL_TEXT = {"anyOf": [{"type": "null"}, *_TEXT["anyOf"]]}
_THOUGHTS = {"anyOf": [{"type": "null"}, _STRING, _parts(responses_input.REASONING_PART)]}


def _shape(kind: str | None, optional: Mapping[str, Any] | None = None, **needs: Any) -> Schema:
    """Returns the schema of an object of this `type` that has all fields of `needs` and may have those of `optional`.
    If `kind` is None, the object may have any `type`.
    """
    typed = {} if kind is None else {"type": {"const": kind}}
    return {"type": "object", "properties": {**typed, **needs, **(optional or {})}, "required": [*typed, *needs]}


def _turn(role: str, kinds: Sequence[str]) -> Schema:
    """Returns the shape of a message of /v1/messages whose blocks are of these types."""
    blocks = {"type": "array", "items": {"type": "object", "properties": {"type": {"enum": list(kinds)}}}}
    return _shape(None, role={"const": role}, content={"anyOf": [_STRING, blocks]})


_SHAPES: Mapping[str, Sequence[Schema]] = {
    "ContentPart": [_shape(None, text=_STRING)],
    "InputPart": [_shape(None, text=_STRING)],
    "ResponseFormat": [
        _shape("text"), _shape("json_object"), _shape("json_schema", json_schema=_shape(None, schema=_SCHEMA)),
    ],
    "TextFormat": [_shape("text"), _shape("json_object"), _shape("json_schema", schema=_SCHEMA)],
    "OutputFormat": [_shape("text"), _shape("json_object"), _shape("json_schema", schema=_SCHEMA)],
    "StructuredOutputs": [_shape(None, {"json": _OPTIONAL_SCHEMA})],
    "ToolUse": [_shape("auto"), _shape("none"), _shape("any"), _shape("tool", name=_NAME)],
    "InputItem": [
        {
            "properties": {"type": {"const": "message"}},  # the default type
            "allOf": [_shape(None, role={"enum": list(responses_input.ROLES)}, content=_TEXT)],
        },
        _shape("reasoning", {"content": _THOUGHTS}),
        _shape("function_call", call_id=_NAME, name=_NAME, arguments=_ARGUMENTS),
        _shape("function_call_output", call_id=_NAME, output=_TEXT),
    ],
    "ContentBlock": [
        _shape("text", text=_STRING),
        _shape("tool_use", id=_STRING, name=_STRING),
        _shape("tool_result", {"content": _OPTIONAL_TEXT}, tool_use_id=_STRING),
        _shape("thinking"),
        _shape("redacted_thinking"),
    ],
    "TurnBody": [_turn(role, kinds) for role, kinds in messages_history.BLOCKS.items()],
    "MessageBody": [
        _shape(None, {"tool_calls": {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}}, content=NOT_NULL),
        _shape(None, role={"const": "assistant"}, tool_calls={"type": "array", "minItems": 1}),
    ],
}  # fmt: skip
"""The alternative schemas of each component's objects."""


def _function(parameters: str, **more: Any) -> Schema:
    """Returns the schema of a function's description. `parameters` is the key under which the description has the
    parameters' schema.
    """
    optional = {parameters: {"type": ["object", "null"]}, "strict": {"type": ["boolean", "null"]}}
    return _shape(None, {**optional, **more}, name={"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"})


_TOOLS: Mapping[type[Body], Schema] = {
    ChatBody: _shape(None, {"type": {"const": "function"}}, function=_function("parameters")),
    ResponsesBody: {"allOf": [_shape("function"), _function("parameters")]},
    CountTokensBody: _function("input_schema", type={"enum": [None, "custom"]}),
}
"""The schema of a tool, by kind of body."""
_CHOICES: Mapping[type[Body], Schema] = {
    ChatBody: _shape("function", function=_shape(None, name=_STRING)),
    ResponsesBody: _shape("function", name=_STRING),
}
"""The schema of the choice of one function, by kind of body."""
_TRUE = {"const": True}
_FILLED = {"type": "array", "minItems": 1}
_TOOLS_GIVEN = has("tools", _FILLED)
_FORM = has("type", {"enum": [form for form in FORMATS if form != "text"]})
_OUTPUTS = [has(name, _TRUE if name == "json_object" else NOT_NULL) for name in KINDS]
_GRAMMARS = [
    has("response_format", _FORM), has("structured_outputs", {"anyOf": _OUTPUTS}),
    *(has(name, NOT_NULL) for name in STRUCTURED_FIELDS if name.startswith("guided_")),
]  # fmt: skip
"""The schemas of the completions and chats that request a grammar, one for each field that can request it."""
_ITEM = {"not": has("type", {"const": "reasoning"})}
"""The schema of an item of /v1/responses other than reasoning. The input must contain at least one."""
_CALLS: Mapping[str, Schema] = {
    "MessageBody": has("tool_calls", _FILLED),
    "InputItem": has("type", {"const": "function_call"}),
    "TurnBody": both(
        has("role", {"const": "assistant"}),
        has("content", {"type": "array", "contains": has("type", {"const": "tool_use"})}),
    ),
}
"""The schemas of the objects that contain tool calls of an earlier answer, by component."""
_BEAMS = has("use_beam_search", _TRUE)
_MANY = {"type": "integer", "exclusiveMinimum": RANGES["beam_width"].high}
_CHECKED_LATER: Sequence[Schema] = [
    both(has("allowed_token_ids", NOT_NULL), has("bad_words", _FILLED)),
    both(_BEAMS, {"anyOf": [
        *(has(name, {"not": {"enum": [None, *values]}}) for name, values in NEUTRAL.items()),
        has("stop", {"not": {"enum": [None, []]}}), has("allowed_token_ids", NOT_NULL), has("n", _MANY),
        has("best_of", _MANY),
    ]}),
    both({"not": _BEAMS}, has("length_penalty", {"not": {"enum": [None, 1]}})),
    both({"not": _BEAMS}, has("early_stopping", {"not": {"enum": [None, False]}})),
]  # fmt: skip
"""The schemas of completions and chats that `gateway.intake` refuses for a combination of fields."""


def add_rules(components: Mapping[str, Schema], bodies: Mapping[str, type[Body]], served: Served) -> None:
    """Adds the rules to the schemas of the components. `bodies` contains the types of the components that are
    bodies.
    """
    for (name, field), values in _VALUES.items():
        for option in options_of(components[name]["properties"][field], "string", "array"):
            (option["items"] if option["type"] == "array" else option)["enum"] = list(values)
    for (name, field), values in _ONLY.items():
        components[name]["properties"][field] = {"enum": list(values)}
    for name, shapes in _SHAPES.items():
        components[name] |= {"anyOf": list(shapes)} if len(shapes) > 1 else {"allOf": list(shapes)}
    _forbid(components["StructuredOutputs"], [both(*pair) for pair in combinations(_OUTPUTS, 2)])
    for option in options_of(components["ResponsesRequest"]["properties"]["input"], "array"):
        option["contains"] = _ITEM
    for name in ("MessagesRequest", "CountTokensRequest"):
        components[name]["properties"]["system"] = _OPTIONAL_TEXT
    if not served.writes_calls:
        for name, calls in _CALLS.items():
            _forbid(components[name], [calls])
    for name, kind in bodies.items():
        broken = [rule.broken for rule in kind.rules] + _misused_grammars(kind)
        if issubclass(kind, SamplingBody):
            components[name]["properties"]["guided_json"] = _OPTIONAL_SCHEMA
            broken += _CHECKED_LATER
        if "tools" in kind.__struct_fields__:
            _add_tools(components[name]["properties"], kind)
            if not (served.reads_tools if kind is TokenizeBody else served.calls_tools):
                broken.append(_tools_offered(kind))
        _forbid(components[name], broken)


def _forbid(schema: Schema, broken: Sequence[Schema]) -> None:
    """Forbids the objects that match one of these schemas. Adds a single `not`, because schemathesis expands every
    `anyOf` of an object and gives up if there are many combinations.
    """
    if broken:
        schema["not"] = {"anyOf": list(broken)}


def _add_tools(properties: Schema, kind: type[Body]) -> None:
    """Adds the schemas of tools and of the choice among them to a body's properties."""
    for base, tool in _TOOLS.items():
        if issubclass(kind, base):
            for option in options_of(properties["tools"], "array"):
                option |= {"items": tool, "maxItems": MAX_TOOLS}
    for base, choice in _CHOICES.items():
        if issubclass(kind, base):
            properties["tool_choice"] = {"anyOf": [{"enum": [None, *CHOICES]}, choice]}


def _misused_grammars(kind: type[Body]) -> list[Schema]:
    """Returns the schemas of bodies that request more than one grammar, or a grammar together with a field that
    excludes grammars.
    """
    form, excluded = has("format", _FORM), []
    if issubclass(kind, SamplingBody):
        grammars, excluded = _GRAMMARS, [_BEAMS, has("bad_words", _FILLED), has("allowed_token_ids", NOT_NULL)]
    elif issubclass(kind, ResponsesBody):
        grammars = [has("text", form)]
    elif issubclass(kind, CountTokensBody):
        grammars = [has("output_config", form)]
    else:
        return []
    asks = {"anyOf": grammars}
    broken = [both(*pair) for pair in combinations(grammars, 2)] + [both(asks, other) for other in excluded]
    if "ignore_eos" in kind.__struct_fields__:
        broken.append(both(asks, has("ignore_eos", _TRUE)))
    if "tools" in kind.__struct_fields__:
        broken.append(both(asks, _tools_offered(kind)))
    return broken


def _tools_offered(kind: type[Body]) -> Schema:
    """Returns the schema of the bodies that have tools and do not forbid their use."""
    none = {"const": "none"}
    if kind is TokenizeBody:
        return _TOOLS_GIVEN
    forbidden = has("tool_choice", has("type", none) if issubclass(kind, CountTokensBody) else none)
    return both(_TOOLS_GIVEN, {"not": forbidden})
