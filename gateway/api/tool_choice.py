"""Checks the tools of a request and its `tool_choice`, for all API formats that have tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from common.errors import InvalidArgument
from gateway.api.field_rules import Condition, Rule, filled
from gateway.intake.limits import MAX_TOOLS
from gateway.tools.enforce import Function

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
Choice = Literal["none", "auto", "required"]
CHOICES: Mapping[str, Choice] = {"none": "none", "auto": "auto", "required": "required"}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A selection of tools that the model may call. It also says whether the model must call a tool."""

    choice: Choice
    """Whether the model must not ("none"), may ("auto") or must ("required") call a tool."""
    functions: tuple[Function, ...] = ()
    many: bool = True
    """Whether one answer may contain several calls."""

    @property
    def enforced(self) -> bool:
        """Whether a grammar restricts the calls."""
        return self.choice == "required" or any(function.strict for function in self.functions)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A request's `tool_choice`, in one form for all APIs."""

    choice: Choice = "auto"
    named: str | None = None
    """The only function that may be called, or None for no such restriction."""
    name_field: str = "tool_choice.name"
    """The field of the request that contains `named`, for error messages."""
    many: bool = True


def call_needs_tools(asks: Callable[[Any], bool], schema: Mapping[str, Any]) -> Rule:
    """Returns the rule that a `tool_choice` for which `asks` is true needs tools. `schema` is a JSON schema that is
    equivalent to `asks`.
    """
    asked = Condition("tool_choice", asks, schema)
    return Rule("asks for a call, but there are no tools", (asked,), filled("tools"))


def chosen_of(given: str | dict[str, Any] | None, name_of: Callable[[dict[str, Any]], object], form: str) -> Chosen:
    """Parses OpenAI's `tool_choice`. `name_of` extracts the function's name from an object that chooses a function, and
    `form` describes the object in error messages. Raises InvalidArgument if `given` has none of the allowed forms.
    """
    if given is None:
        return Chosen()
    if isinstance(given, str) and given in CHOICES:
        return Chosen(CHOICES[given])
    name = name_of(given) if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(name, str):
        raise InvalidArgument.of("tool_choice", f"must be none, auto, required or {form}")
    return Chosen("required", name)


def function_of(name: str, given: Mapping[str, Any], parameters: str = "parameters") -> Function:
    """Checks the description of a function and returns the function. `name` identifies the description in error
    messages, and `parameters` is the key of the function's schema. Raises InvalidArgument if a value is invalid.
    """
    own_name, schema, strict = given.get("name"), given.get(parameters), given.get("strict")
    if not isinstance(own_name, str) or not FUNCTION_NAME.fullmatch(own_name):
        raise InvalidArgument.of(f"{name}.name", "must be 1 to 128 letters, digits or any of _ . : / -")
    if not isinstance(schema, dict | None):
        raise InvalidArgument.of(f"{name}.{parameters}", "must be a JSON schema, as an object")
    if not isinstance(strict, bool | None):
        raise InvalidArgument.of(f"{name}.strict", "must be true or false")
    return Function(own_name, schema or _NO_PARAMETERS, strict=bool(strict))


def tool_choice_of(functions: Sequence[Function], chosen: Chosen) -> ToolChoice:
    """Returns the functions of a request that may be called, and the choice. Raises InvalidArgument if the functions or
    the choice are invalid, or if the chosen function is missing.
    """
    if len(functions) > MAX_TOOLS:
        raise InvalidArgument.of("tools", f"must hold at most {MAX_TOOLS} tools, got {len(functions)}")
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidArgument.of("tools", "must not contain two functions with the same name")
    if chosen.named is None:
        found = ToolChoice(chosen.choice if functions else "none", tuple(functions), chosen.many)
        return replace(found, functions=()) if found.choice == "none" else found
    if chosen.named not in names:
        raise InvalidArgument.of(chosen.name_field, f"must be the name of a tool, got {chosen.named[:100]!r}")
    return ToolChoice("required", tuple(f for f in functions if f.name == chosen.named), many=False)


def chat_tool(given: Mapping[str, Any], parameters: str = "parameters") -> dict[str, Any]:
    """Returns a function's description in the form that chat templates expect."""
    keys = {"name": "name", "description": "description", "parameters": parameters, "strict": "strict"}
    function = {key: given[own] for key, own in keys.items() if given.get(own) is not None}
    return {"type": "function", "function": function}
