"""Converts the schemas of a function's arguments to the form that grammars contain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is formatted as `json.dumps` formats it. If any white space were allowed, a model could write it endlessly."""
NOTES = frozenset(("description", "title", "examples", "default", "$comment", "x-guidance"))
"""Keywords that grammars omit. They describe the schema, except `x-guidance`, which controls the grammar's compiler."""
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose value maps names chosen by the client to schemas."""
_DATA = frozenset(("enum", "const", "required", "dependentRequired", "type"))
"""Keywords whose value is data and is copied unchanged."""


def object_schema(parameters: Mapping[str, Any]) -> str:
    """Returns the schema of a function's arguments as one line. A schema that has none of `type`, `$ref`, `anyOf`,
    `oneOf` and `allOf` becomes the schema of an object.
    """
    schema = without_notes(parameters)
    if not any(key in schema for key in ("type", "$ref", "anyOf", "oneOf", "allOf")):
        schema["type"] = "object"
    return _line(schema)


def value_schema(schema: Any, root: Mapping[str, Any]) -> str:
    """Returns the schema of one argument, on one line, with the definitions of the function's schema."""
    if not isinstance(schema, Mapping):
        return _line({})
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return _line(without_notes({**shared, **schema}))


def without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema without the keywords in `NOTES`, which are also removed from the schemas that it contains."""
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            kept[key] = {name: _inner(item) for name, item in value.items()}
        elif key not in NOTES:
            kept[key] = value if key in _DATA else _inner(value)
    return kept


def _inner(value: Any) -> Any:
    if isinstance(value, list):
        return [_inner(item) for item in value]
    return without_notes(value) if isinstance(value, dict) else value


def _line(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _SPELLING})
