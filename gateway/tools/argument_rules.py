"""Writes grammar rules for arguments that are not one JSON object: for text between tags, and for keyword arguments.

Required arguments come first, in the order of the schema's `required` list. Only arguments that the schema names are
allowed. If the schema names none, any arguments are allowed, unless the schema forbids additional properties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.tools.schemas import NOTES, value_schema
from gateway.tools.tag_parsers import Tags
from gateway.tools.typed_values import STRING, items, resolved, types_of

_ANY = r"/(.|\n)*/"
_ROOT = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"))
_PLAIN = frozenset(("type", "enum", "const", "anyOf", "oneOf")) | NOTES
"""The keywords that can be enforced in the schema of a text."""
_NAME = r"ARGUMENT_NAME: /[a-zA-Z_][a-zA-Z0-9_]*/"


@dataclass(frozen=True, slots=True)
class Property:
    name: str
    schema: Any
    is_required: bool


def properties_of(parameters: Mapping[str, Any]) -> list[Property]:
    """Returns the properties of a function's schema, with the required properties first. Raises ValueError if the
    schema is malformed, or has a keyword or a name that these rules cannot express.
    """
    root = resolved(parameters, parameters)
    if others := sorted(set(root) - _ROOT - NOTES):
        raise ValueError(f"the keyword {others[0]!r} of a function's parameters")
    found, required = root.get("properties", {}), root.get("required", [])
    if not isinstance(found, dict) or not isinstance(required, list) or not all(isinstance(n, str) for n in required):
        raise ValueError("parameters whose properties are not an object, or whose required names are not a list")
    named = [*required, *(name for name in found if name not in required)]
    if bad := [name for name in named if not re.fullmatch(r"[\w.-]+", name)]:
        raise ValueError(f"the name {bad[0][:100]!r} of an argument")
    return [Property(name, found.get(name, {}), name in required) for name in dict.fromkeys(named)]


def is_open(parameters: Mapping[str, Any]) -> bool:
    """Returns whether the arguments may have arbitrary names, which is so if the schema names no properties and does
    not forbid additional properties.
    """
    root = resolved(parameters, parameters)
    names_some = root.get("properties") or root.get("required")
    return not names_some and root.get("additionalProperties", True) is not False


class PythonicRules:
    """The grammar rules for `name(key=value, ...)`. Values are JSON, but a boolean argument whose schema has neither
    `enum` nor `const` is written as in Python.
    """

    shared: Sequence[str] = (_NAME, 'any_argument: ARGUMENT_NAME "=" any_value', "any_value: %json {}")

    def tool(self, name: str, index: int, parameters: Mapping[str, Any]) -> list[str]:
        return [f'tool_{index}: {json.dumps(name + "(")} arguments_{index} ")"', *self._arguments(index, parameters)]

    def _arguments(self, index: int, parameters: Mapping[str, Any]) -> list[str]:
        if is_open(parameters):
            return [f'arguments_{index}: (any_argument (", " any_argument)*)?']
        given, lines = properties_of(parameters), list[str]()
        for number, item in enumerate(given):
            value = f"value_{index}_{number}"
            lines.append(f"argument_{index}_{number}: {json.dumps(item.name + '=')} {value}")
            lines.append(f"{value}: {self._value(item.schema, parameters)}")
        named = [(f"argument_{index}_{number}", item) for number, item in enumerate(given)]
        return [f"arguments_{index}: {in_order(named, ', ')}", *lines]

    def _value(self, schema: Any, root: Mapping[str, Any]) -> str:
        if types_of(schema, root) == {"boolean"} and not {"enum", "const"} & set(resolved(schema, root)):
            return '"True" | "False"'
        return f"%json {value_schema(schema, root)}"


def in_order(named: Sequence[tuple[str, Property]], separator: str) -> str:
    """Returns a grammar of arguments with a separator between them. `named` contains, for each argument, the name of
    its rule and its property. Optional arguments come last.
    """
    comma = json.dumps(separator)
    required = [rule for rule, item in named if item.is_required]
    optional = [rule for rule, item in named if not item.is_required]
    tails = [f"({comma} {rule})?" for rule in optional]
    if required:
        return " ".join([f" {comma} ".join(required), *tails])
    starts = [" ".join([rule, *tails[number + 1 :]]) for number, rule in enumerate(optional)]
    return f"({' | '.join(starts)})?" if starts else '""'


class TagRules:
    """The grammar rules for arguments between tags: strings are text, other values are JSON."""

    def __init__(self, tags: Tags, line_break: str, mark: Callable[[str], str]) -> None:
        """`line_break` separates the parts of a call. `mark` converts a tag to the grammar's notation."""
        self._tags = tags
        self._break = line_break
        self._mark = mark

    @property
    def shared(self) -> Sequence[str]:
        end = self._mark(self._tags.value_end)
        if end.startswith("<["):
            text = [f"TEXT_VALUE: {_ANY}", f"text_value: TEXT_VALUE {end}"]
        else:
            text = [f"text_value[suffix={json.dumps(self._pad + self._tags.value_end)}]: {_ANY}"]
        named = f"{self._mark(self._tags.key)} ARGUMENT_NAME {self._mark(self._tags.keyed)}"
        return (_NAME, *text, f"any_argument: {named} {self._before_value} text_value {self._line}")

    def tool(self, name: str, index: int, parameters: Mapping[str, Any]) -> list[str]:
        tags = self._tags
        begin = json.dumps(tags.call + name + tags.named + self._break)
        if is_open(parameters):
            return [f"tool_{index}: {begin} any_argument* {self._mark(tags.call_end)}"]
        given, lines = properties_of(parameters), list[str]()
        for number, item in enumerate(given):
            key = f"{self._mark(tags.key)} {json.dumps(item.name)}"
            value = self._keyed_value(item, parameters, f"value_{index}_{number}", lines)
            lines.append(f"argument_{index}_{number}: {key} {value} {self._line}")
        parts = [f"argument_{index}_{n}{'' if item.is_required else '?'}" for n, item in enumerate(given)]
        return [f"tool_{index}: {' '.join([begin, *parts])} {self._mark(tags.call_end)}", *lines]

    @property
    def _pad(self) -> str:
        return "\n" if self._tags.is_padded else ""

    @property
    def _line(self) -> str:
        return json.dumps(self._break) if self._break else ""

    @property
    def _before_value(self) -> str:
        tags = self._tags
        return f"{self._line} {self._mark(tags.value)}" if tags.value else json.dumps(self._pad) if self._pad else ""

    def _keyed_value(self, item: Property, root: Mapping[str, Any], rule: str, lines: list[str]) -> str:
        """Returns the grammar of an argument after its name. Adds a rule to `lines` if the value needs one."""
        tags, types = self._tags, types_of(item.schema, root)
        before = f"{self._mark(tags.keyed)} {self._before_value}"
        if not tags.keyed_json:
            return f"{before} {self._value(item, root, rule, lines)}"
        before_json, end = f"{self._mark(tags.keyed_json)} {self._before_value}", self._mark(tags.value_end)
        if "string" not in types:
            return f"{before_json} {self._value(item, root, rule, lines)}"
        values = _text_values(item.name, item.schema, root, set())
        if values is None:
            null = f' | {before_json} "null" {end}' if "null" in types else ""
            return f"({before} text_value{null})"
        choices = [
            f"{before if isinstance(value, str) else before_json} {json.dumps(self._choice(item.name, value))} {end}"
            for value in values
        ]
        return f"({' | '.join(choices)})"

    def _value(self, item: Property, root: Mapping[str, Any], rule: str, lines: list[str]) -> str:
        """Returns the grammar of a value and its end tag. Adds a rule to `lines` if the value needs one."""
        end = self._mark(self._tags.value_end)
        closed = f"{json.dumps(self._pad)} {end}" if self._pad else end
        if "string" not in types_of(item.schema, root):
            lines.append(f"{rule}: %json {value_schema(item.schema, root)}")
            return f"{rule} {closed}"
        values = _text_values(item.name, item.schema, root, set())
        if values is None:
            return "text_value"
        return f"({' | '.join(json.dumps(self._choice(item.name, value)) for value in values)}) {closed}"

    def _choice(self, name: str, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if not text or self._tags.value_end in text:
            raise ValueError(f"the value {text[:100]!r} of {name!r}")
        return text


def _text_values(name: str, schema: Any, root: Mapping[str, Any], seen: set[int]) -> list[Any] | None:
    """Returns the values that a text's schema allows, or None if the schema allows any text. Raises ValueError for a
    schema that cannot be enforced for text between tags.
    """
    schema = resolved(schema, root)
    choices = [*items(schema, "anyOf"), *items(schema, "oneOf")]
    values = [*items(schema, "enum"), *([schema["const"]] if "const" in schema else ())]
    kinds = {"anyOf", "oneOf", "enum", "const"} & set(schema)
    if set(schema) - _PLAIN or len(kinds) > 1 or id(schema) in seen:
        raise ValueError(f"the schema of {name!r}, a text with further rules,")
    seen.add(id(schema))
    if choices:
        found = [_text_values(name, choice, root, seen) for choice in choices]
        return None if None in found else [value for some in found if some is not None for value in some]
    types = types_of(schema, root)
    if values:
        return values
    if not types <= STRING | {"null"}:
        raise ValueError(f"the schema of {name!r}, a text of several types,")
    return None if "string" in types else [None]
