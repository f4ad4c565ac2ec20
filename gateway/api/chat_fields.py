"""Converts the fields of a chat body that determine the chat template's input and the tools that the model may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from common.errors import InvalidArgument
from gateway.api.chat_messages import MessageBody, plain_messages
from gateway.api.field_rules import Rule, equals, given
from gateway.api.tool_choice import ToolChoice, call_needs_tools, chosen_of, function_of, tool_choice_of
from gateway.intake.wanted import ChatPrompt
from gateway.tools.enforce import Function

TEMPLATE_RULES = (
    Rule("cannot be given: a template is a program, and only the model's own is run", (given("chat_template"),)),
    Rule(
        "cannot be combined with add_generation_prompt",
        (equals("continue_final_message", True), equals("add_generation_prompt", True)),
    ),
)
"""The rules for the fields of `TemplateFields`."""
CALL_NEEDS_TOOLS = call_needs_tools(
    lambda choice: choice == "required" or isinstance(choice, dict),
    {"anyOf": [{"const": "required"}, {"type": "object"}]},
)
"""The rule that a `tool_choice` which requires a call needs tools, for OpenAI's form of the field."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class TemplateFields(Protocol):
    """The interface of a body (of a chat or of /tokenize) with inputs of the chat template other than messages."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    chat_template: str | None


class ToolFields(TemplateFields, Protocol):
    """The interface of a chat body whose fields say which tools the model may or must call."""

    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None


NAMES = frozenset((*TemplateFields.__annotations__, *ToolFields.__annotations__))


def chat_prompt(body: TemplateFields, messages: Sequence[MessageBody], effort: str | None = None) -> ChatPrompt:
    """Returns the prompt of a chat. Raises InvalidArgument if a field of the body or a message is invalid."""
    plain, goes_on = plain_messages(messages), bool(body.continue_final_message)
    if goes_on and not (plain and plain[-1]["content"]):
        raise InvalidArgument.of("continue_final_message", "needs a last message with content")
    return ChatPrompt(
        plain,
        tools=body.tools or None,
        variables={**effort_variable("reasoning_effort", effort), **(body.chat_template_kwargs or {})},
        add_generation_prompt=body.add_generation_prompt is not False and not goes_on,
        continue_final_message=goes_on,
    )


def effort_variable(name: str, effort: str | None) -> dict[str, str]:
    """Returns the chat template's variable for a reasoning effort, or no variable if `effort` is None. Raises
    InvalidArgument for an unknown effort. `name` identifies the field in error messages.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidArgument.of(name, f"must be one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": effort}


def tool_choice(body: ToolFields) -> ToolChoice:
    """Returns the tools of a body that the model may call, and whether the model must call one. Raises InvalidArgument
    if the tools or the choice are invalid.
    """
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())]
    chosen = chosen_of(body.tool_choice, _name_in, '{"type": "function", "function": {"name": ...}}')
    many = body.parallel_tool_calls is not False
    return tool_choice_of(functions, replace(chosen, name_field="tool_choice.function.name", many=many))


def _name_in(choice: Mapping[str, Any]) -> object:
    function = choice.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _function(name: str, tool: Mapping[str, Any]) -> Function:
    if tool.get("type", "function") != "function":
        raise InvalidArgument.of(f"{name}.type", "must be function; nothing else is supported")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidArgument.of(f"{name}.function", "must be an object")
    return function_of(f"{name}.function", function)
