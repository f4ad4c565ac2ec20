"""Converts the HTTP fields that request structured output: `response_format` (OpenAI), `structured_outputs` and
`guided_*` (vLLM). A request may use one of them to request a grammar, which becomes a `StructuredOutput`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from common.errors import InvalidArgument
from common.types import GrammarKind, StructuredOutput

NOT_GIVEN = msgspec.Raw(b"null")
"""The default of a field that is kept as JSON, because msgspec does not accept `Raw | None`."""


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The `json_schema` of a `response_format`. The schema is enforced even if `strict` is false."""

    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = NOT_GIVEN
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The object of OpenAI's `response_format` field."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """The object of vLLM's `structured_outputs` field."""

    json: msgspec.Raw = NOT_GIVEN
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


FORMATS = ("text", "json_object", "json_schema")
"""The types of OpenAI's `response_format`."""
STRUCTURED_FIELDS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)  # fmt: skip
Found = tuple[str, StructuredOutput]
"""The name of a field and the structured output that it requests."""
KINDS: Mapping[str, GrammarKind] = {
    "json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "lark",
}  # fmt: skip


def structured_of(fields: Mapping[str, Any]) -> Found | None:
    """Returns the structured output that a body requests, with the name of the field, or None for free text.

    Raises InvalidArgument if a field is invalid or if the body requests more than one grammar.
    """
    found = list(_all_of(fields))
    if len(found) > 1:
        raise InvalidArgument.of(found[1][0], f"cannot be combined with {found[0][0]}; give one grammar")
    return found[0] if found else None


def _all_of(fields: Mapping[str, Any]) -> Iterator[Found]:
    response_format: ResponseFormat | None = fields["response_format"]
    if response_format is not None and (found := _of_format(response_format)):
        yield found
    outputs: StructuredOutputs | None = fields["structured_outputs"]
    for key in KINDS if outputs is not None else ():
        if _is_given(value := getattr(outputs, key)):
            yield _of_value(f"structured_outputs.{key}", KINDS[key], value)
    for key in ("json", "regex", "choice", "grammar"):
        if _is_given(value := fields[f"guided_{key}"]):
            yield _of_value(f"guided_{key}", KINDS[key], value)


def _is_given(value: Any) -> bool:
    if isinstance(value, msgspec.Raw):
        return bytes(value) != b"null"
    return value is not None and value is not False


def _of_format(given: ResponseFormat) -> Found | None:
    schema = NOT_GIVEN if given.json_schema is None else given.json_schema.schema
    return structured_of_type("response_format", given.type, "json_schema.schema", schema)


def structured_of_type(name: str, kind: str, schema_name: str, schema: msgspec.Raw) -> Found | None:
    """Returns the structured output that an object of type `kind` requests, or None for free text. Errors name the
    object `name` and its schema `name`.`schema_name`. Raises InvalidArgument if the object is invalid.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return name, StructuredOutput("json_object")
    if kind != "json_schema":
        raise InvalidArgument.of(f"{name}.type", "must be text, json_object or json_schema")
    if not _is_given(schema):
        raise InvalidArgument.of(f"{name}.{schema_name}", "must be given")
    return _of_value(f"{name}.{schema_name}", "json_schema", schema)


def _of_value(name: str, kind: GrammarKind, value: Any) -> Found:
    if kind == "json_schema":
        return name, StructuredOutput(kind, _schema_text(bytes(value)))
    if kind == "choice":
        return name, StructuredOutput(kind, options=tuple(value))
    return name, StructuredOutput(kind, "" if value is True else value)


def _schema_text(raw: bytes) -> str:
    """Returns a schema as text. vLLM accepts a schema as an object, or as a string that contains one."""
    if raw.startswith(b'"'):
        text: str = json.loads(raw)
        return text
    return raw.decode()
