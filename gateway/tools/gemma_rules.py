"""Writes grammar rules for arguments in the notation of Gemma, in which keys have no quotation marks and texts are
between two marks.

As in `argument_rules`, required arguments come first, in the order of the schema's `required` list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.tools.argument_rules import in_order, is_open, properties_of
from gateway.tools.schemas import NOTES, value_schema
from gateway.tools.typed_values import items, resolved

_KEY = re.compile(r"\w+", re.ASCII)
_TEXT = frozenset(("type",))
_LIST = frozenset(("type", "items", "minItems", "maxItems"))
_CHOICES = frozenset(("type", "enum", "const", "anyOf", "oneOf"))


class GemmaRules:
    """The grammar rules for `call:name{key:value,...}`."""

    def __init__(self, quote: str, mark: Callable[[str], str]) -> None:
        """`mark` converts a mark to the grammar's notation."""
        self._quote = quote
        self._mark = mark

    @property
    def shared(self) -> Sequence[str]:
        quote = self._mark(self._quote)
        if quote.startswith("<["):
            text = ["QUOTED_TEXT: /(.|\\n)*/", f"text: {quote} QUOTED_TEXT {quote}"]
        else:
            text = [f"text: {quote} quoted", f"quoted[suffix={quote}]: /(.|\\n)*/"]
        return (
            *text,
            "any_value: text | plain_value | any_list | any_object",
            'plain_value: %json {"type": ["number", "boolean", "null"]}',
            'any_list: "[" (any_value ("," any_value)*)? "]"',
            'any_object: "{" (any_member ("," any_member)*)? "}"',
            'any_member: ANY_KEY ":" any_value',
            "ANY_KEY: /[a-zA-Z_][a-zA-Z0-9_]*/",
        )

    def tool(self, name: str, index: int, parameters: Mapping[str, Any]) -> list[str]:
        values = _Values(parameters, f"value_{index}_", self._text)
        return [f"tool_{index}: {json.dumps(f'call:{name}')} {values.object(parameters)}", *values.lines]

    def _text(self, text: str) -> str:
        """Returns the grammar of one text. Raises ValueError if the text is empty or contains the mark."""
        if not text or self._quote in text:
            raise ValueError(f"the value {text[:100]!r}")
        return f"{self._mark(self._quote)} {json.dumps(text, ensure_ascii=False)} {self._mark(self._quote)}"


class _Values:
    """A writer of the rules for the values of one function's arguments."""

    def __init__(self, root: Mapping[str, Any], prefix: str, text: Callable[[str], str]) -> None:
        """`root` is the function's schema. The names of rules begin with `prefix`. `text` returns the grammar of one
        text.
        """
        self.lines: list[str] = []
        self._root = root
        self._prefix = prefix
        self._text = text
        self._open: set[int] = set()
        """The ids of the schemas around the current one. A schema within itself is refused."""

    def object(self, schema: Mapping[str, Any]) -> str:
        """Returns the grammar of an object with the properties that a schema names."""
        if is_open(schema):
            return "any_object"
        given = properties_of(schema)
        members = [self._rule(f"{_key(item.name)} {self._value(item.schema)}") for item in given]
        return self._rule(f'"{{" {in_order(list(zip(members, given, strict=True)), ",")} "}}"')

    def _value(self, schema: Any) -> str:
        """Returns the grammar of a value. Raises ValueError for a schema that cannot be enforced in this notation."""
        is_reference = isinstance(schema, Mapping) and "$ref" in schema
        schema = resolved(schema, self._root)
        if is_reference and not schema:
            raise ValueError("a reference to a schema that is not there")
        if id(schema) in self._open:
            raise ValueError("a recursive schema")
        self._open.add(id(schema))
        try:
            return self._of_kind({key: value for key, value in schema.items() if key not in NOTES})
        finally:
            self._open.discard(id(schema))

    def _of_kind(self, schema: Mapping[str, Any]) -> str:
        types = schema.get("type")
        if kinds := {"anyOf", "oneOf", "enum", "const"} & set(schema):
            return self._choice(schema, kinds)
        if isinstance(types, list):
            return self._alternatives([self._of_kind({**schema, "type": each}) for each in types])
        if types is None and not schema:
            return "any_value"
        if types == "string":
            _check_keywords(schema, _TEXT)
            return "text"
        if types == "array":
            return self._list(schema)
        if types == "object":
            return self.object(schema)
        if types in ("integer", "number", "boolean", "null"):
            return self._rule(f"%json {value_schema(schema, self._root)}")
        raise ValueError(f"a schema without a type, but with {next(iter(schema))!r}")

    def _choice(self, schema: Mapping[str, Any], kinds: set[str]) -> str:
        if len(kinds) > 1 or set(schema) - _CHOICES:
            raise ValueError(f"{', '.join(sorted(schema))} in one schema")
        schemas = [*items(schema, "anyOf"), *items(schema, "oneOf")]
        values = [*items(schema, "enum"), *([schema["const"]] if "const" in schema else ())]
        return self._alternatives([*map(self._value, schemas), *map(self._constant, values)])

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return f'"[" {_joined([self._constant(item) for item in value])} "]"'
        if isinstance(value, dict):
            members = [f"{_key(key)} {self._constant(item)}" for key, item in value.items()]
            return f'"{{" {_joined(members)} "}}"'
        return json.dumps(json.dumps(value))

    def _list(self, schema: Mapping[str, Any]) -> str:
        _check_keywords(schema, _LIST)
        item = self._value(schema.get("items", {}))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None) or (most is not None and most < least):
            raise ValueError("the limits of a list")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        return self._rule(f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"')

    def _alternatives(self, choices: Sequence[str]) -> str:
        if not choices:
            raise ValueError("a schema without a value")
        return self._rule(" | ".join(choices))

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _check_keywords(schema: Mapping[str, Any], allowed: frozenset[str]) -> None:
    if others := sorted(set(schema) - allowed):
        raise ValueError(f"the keyword {others[0]!r} of an argument")


def _key(name: str) -> str:
    if not _KEY.fullmatch(name):
        raise ValueError(f"the name {name[:100]!r} of an argument")
    return json.dumps(f"{name}:")


def _joined(parts: Sequence[str]) -> str:
    return ' "," '.join(parts)
