"""Generates random JSON schemas from a seed. In the schemas of `random_schemas`, strings and arrays are short, so that
the built-in model can reach the end of an answer.
"""

from __future__ import annotations

import random
from typing import Any

FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
PATTERNS = ("^[a-z]{2,5}$", "^(cat|dog)s?$", "^[A-Z][0-9]{3}$", "[0-9]{2}")
LEAVES = (
    "string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format", "bounded", "multiple",
    "types",
)  # fmt: skip
SHORT_LEAVES = ("integer", "boolean", "null", "bounded", "multiple", "types")
LONG_ITEMS = 50
KINDS = (*LEAVES, "array", "tuple", "object", "optional", "anyOf", "allOf", "oneOf", "ref", "map")
ODD: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3},
    {"type": "array", "contains": {"const": 1}, "maxItems": 2},
    {"type": "object", "minProperties": 2, "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "maxProperties": 1},
    {"type": "object", "propertyNames": {"maxLength": 2}, "maxProperties": 1},
    {"type": "object", "properties": {"a": {"type": "null"}}, "dependentRequired": {"a": ["b"]}, "maxProperties": 1},
    {"oneOf": [{"type": "integer", "maximum": 9}, {"type": "integer", "minimum": 5, "maximum": 20}]},
    {"if": {"type": "integer"}, "then": {"maximum": 5}},
    {"type": "integer", "unevaluatedProperties": False, "maximum": 9, "minimum": 0},
    {"type": "string", "format": "regex", "maxLength": 5},
    {"type": "string", "contentEncoding": "base64", "maxLength": 4},
    {"$dynamicRef": "#node"},
    {"type": ["integer"], "enum": ["a", 3]},
    {"const": "a", "type": "integer"},
]
"""Schemas with keywords that llguidance supports only in part or not at all, or with contradictory keywords."""


def leaf(rng: random.Random, kind: str) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    made: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 8)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)},
        "number": {"type": "number", "minimum": 0, "maximum": 9.5},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": rng.sample(["a", "bb", 1, 2.5, None, True, {"x": 1}, [1, "y"]], rng.randint(1, 4))},
        "const": {"const": rng.choice(["fixed", 7, None, {"k": ["v"]}])},
        "pattern": {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12},
        "format": {"type": "string", "format": rng.choice(FORMATS)},
        "bounded": {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 20},
        "multiple": {"type": "integer", "multipleOf": rng.choice([2, 5, 10]), "minimum": 0, "maximum": 100},
        "types": {"type": rng.sample(["integer", "boolean", "null"], 2), "minimum": 0, "maximum": 99},
    }
    return made[kind]


def schema_of(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(KINDS if depth else LEAVES)
    if kind in LEAVES:
        return leaf(rng, kind)

    def inner() -> dict[str, Any]:
        return schema_of(rng, depth - 1)

    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [inner(), inner()], "items": False, "minItems": 2}
    if kind == "anyOf":
        return {"anyOf": [inner(), inner()]}
    if kind == "allOf":
        return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": rng.randint(5, 90)}]}
    if kind == "oneOf":
        return {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 50}, {"type": "null"}]}
    if kind == "map":
        return {"type": "object", "additionalProperties": leaf(rng, "boolean"), "maxProperties": 1}
    if kind == "ref":
        return {"$defs": {"part": inner()}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
    names = rng.sample(["id", "name", "größe", 'q"uote', "z"], rng.randint(1, 4))
    required = names if kind == "object" else names[: rng.randint(0, len(names))]
    return {
        "type": "object", "properties": {name: inner() for name in names}, "required": required,
        "additionalProperties": False,
    }  # fmt: skip


def with_local_refs(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with all definitions moved to its root, where the `$ref`s point, under unique names."""
    definitions: dict[str, Any] = {}

    def moved(node: Any) -> Any:
        if isinstance(node, list):
            return [moved(item) for item in node]
        if not isinstance(node, dict):
            return node
        node = {key: moved(value) for key, value in node.items()}
        if isinstance(part := node.pop("$defs", None), dict):
            name = f"part{len(definitions)}"
            definitions[name] = part["part"]
            node["items"] = {"$ref": f"#/$defs/{name}"}
        return node

    found: dict[str, Any] = moved(schema)
    return found | ({"$defs": definitions} if definitions else {})


def random_schemas(number: int, seed: int) -> list[dict[str, Any]]:
    """Returns schemas with at most two levels of nesting. Every twentieth schema comes from `ODD`."""
    rng = random.Random(seed)
    return [rng.choice(ODD) if place % 20 == 19 else with_local_refs(schema_of(rng, 2)) for place in range(number)]


def long_schemas(number: int, seed: int) -> list[dict[str, Any]]:
    """Returns schemas whose answers are arrays of `LONG_ITEMS` short values."""
    rng = random.Random(seed)
    items = [leaf(rng, rng.choice(SHORT_LEAVES)) for _ in range(number)]
    return [{"type": "array", "items": item, "minItems": LONG_ITEMS, "maxItems": LONG_ITEMS} for item in items]
