"""The fields of a chat body that determine the chat template's input and the tools that the model may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from common.errors import InvalidArgument
from gateway.api.chat_messages import MessageBody, plain_messages
from gateway.intake.limits import MAX_TOOLS
from gateway.intake.wanted import ChatPrompt
from gateway.tools.enforce import Function

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
Choice = Literal["none", "auto", "required"]


class TemplateFields(Protocol):
    """The chat template's inputs other than the messages, for chats and /tokenize."""

    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    chat_template: str | None


class ToolFields(TemplateFields, Protocol):
    """The fields of a chat that say which tools the model may or must call."""

    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None


NAMES = frozenset((*TemplateFields.__annotations__, *ToolFields.__annotations__))


def chat_prompt(body: TemplateFields, messages: Sequence[MessageBody], effort: str | None = None) -> ChatPrompt:
    """Returns the prompt of a body. Raises InvalidArgument if it is not valid."""
    if body.chat_template is not None:
        what = "cannot be given: a template is a program, and only the model's own is run"
        raise InvalidArgument.of("chat_template", what)
    plain, goes_on = plain_messages(messages), bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise InvalidArgument.of("continue_final_message", "and add_generation_prompt exclude each other")
    if goes_on and not (plain and plain[-1]["content"]):
        raise InvalidArgument.of("continue_final_message", "needs a last message with content")
    if effort is not None and effort not in _EFFORTS:
        raise InvalidArgument.of("reasoning_effort", f"must be one of {', '.join(_EFFORTS)}")
    return ChatPrompt(
        plain,
        tools=body.tools or None,
        variables={**({} if effort is None else {"reasoning_effort": effort}), **(body.chat_template_kwargs or {})},
        add_generation_prompt=body.add_generation_prompt is not False and not goes_on,
        continue_final_message=goes_on,
    )


def tool_choice(body: ToolFields) -> ToolChoice:
    """Checks the tools of a body. Returns them and which of them may be called."""
    functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(body.tools or ())]
    if len(functions) > MAX_TOOLS:
        raise InvalidArgument.of("tools", f"must hold at most {MAX_TOOLS} tools, got {len(functions)}")
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidArgument.of("tools", "must hold each function's name once")
    choice, named = _choice(body.tool_choice)
    if not functions and choice == "required":
        raise InvalidArgument.of("tool_choice", "asks for a call, but there are no tools")
    if named is not None and named not in names:
        raise InvalidArgument.of("tool_choice.function.name", f"must be the name of a tool, got {named[:100]!r}")
    if named is not None:
        functions = [function for function in functions if function.name == named]
    single = named is not None or body.parallel_tool_calls is False
    return ToolChoice(choice if functions else "none", tuple(functions), many=not single)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools the model may call."""

    choice: Choice
    """none: the model must not call a tool; auto: the model decides; required: the model must call a tool."""
    functions: tuple[Function, ...] = ()
    many: bool = True
    """Whether the model may call several tools."""


def _choice(given: str | dict[str, Any] | None) -> tuple[Choice, str | None]:
    """Returns the choice, and the function's name if there is one."""
    if given is None or given == "auto":
        return "auto", None
    if given == "none":
        return "none", None
    if given == "required":
        return "required", None
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        what = 'must be none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise InvalidArgument.of("tool_choice", what)
    return "required", name


def _function(name: str, tool: Mapping[str, Any]) -> Function:
    if tool.get("type", "function") != "function":
        raise InvalidArgument.of(f"{name}.type", "must be function; nothing else is supported")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidArgument.of(f"{name}.function", "must be an object")
    given = function.get("name")
    if not isinstance(given, str) or not _NAME.fullmatch(given):
        what = "must be 1 to 128 letters, digits or any of _ . : / -"
        raise InvalidArgument.of(f"{name}.function.name", what)
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None):
        raise InvalidArgument.of(f"{name}.function.parameters", "must be a JSON schema, as an object")
    return Function(given, parameters or {"type": "object", "properties": {}, "additionalProperties": False})
