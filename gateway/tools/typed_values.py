"""Converts the text of an argument to JSON, for formats in which arguments are plain text.

The tool's schema determines the types of the arguments. As in vLLM, the types of the schema are tried in a fixed order
(`_CONVERSIONS`). Text that matches none of the types is passed on as JSON if it is valid JSON and the schema allows no
string, and otherwise becomes a string. In addition, references to `$defs` are followed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

STRING = frozenset({"string"})
_MAX_REFERENCES = 8
"""The longest chain of references that is followed."""
_NAMES: Mapping[type, str] = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the schema to which a local reference leads, or the schema itself if it is not a reference. Returns an
    empty schema if the result is not an object.
    """
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(path := schema.get("$ref"), str):
            break
        schema = root
        for key in filter(None, path.removeprefix("#").split("/")):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Returns the names of the types that a schema mentions, or "string" if it mentions none."""
    return frozenset(_types(schema, root, set())) or STRING


def _types(schema: Any, root: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """Yields names of types. `seen` contains the ids of the schemas visited so far. Each schema is visited only once,
    because schemas may be recursive.
    """
    schema = resolved(schema, root)
    if id(schema) in seen:
        return
    seen.add(id(schema))
    given = schema.get("type")
    yield from [given] if isinstance(given, str) else [t for t in items(schema, "type") if isinstance(t, str)]
    values = [*items(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    yield from (_NAMES[type(value)] for value in values)
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in items(schema, key):
            yield from _types(choice, root, seen)


def items(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Returns the list at this keyword, or an empty list if there is none."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def json_of(text: str, types: frozenset[str]) -> str:
    """Returns the JSON of an argument whose schema allows these types."""
    for name, convert in _CONVERSIONS.items():
        if name in types and (found := convert(text.strip())) is not None:
            return found
    if "string" not in types and (found := _parsed(text)) is not None:
        return found
    return json.dumps(text, ensure_ascii=False)


def _null(text: str) -> str | None:
    return "null" if text.lower() in ("null", "none") else None


def _integer(text: str) -> str | None:
    digits = text.removeprefix("-").removeprefix("+")
    return str(int(text)) if digits.isascii() and digits.isdigit() and len(digits) <= 1000 else None


def _number(text: str) -> str | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return str(int(value)) if value == int(value) else json.dumps(value)


def _boolean(text: str) -> str | None:
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.lower())


def _parsed(text: str) -> str | None:
    """Returns JSON text on one line, or None if the text is not JSON."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


_CONVERSIONS: Mapping[str, Callable[[str], str | None]] = {
    "null": _null, "integer": _integer, "number": _number, "boolean": _boolean, "object": _parsed, "array": _parsed,
}  # fmt: skip
