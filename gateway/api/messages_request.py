"""Defines the bodies of POST /v1/messages and /v1/messages/count_tokens (Anthropic's API), with text and tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from common.errors import InvalidArgument, Unimplemented
from gateway.api.chat_fields import effort_variable
from gateway.api.messages_history import TurnBody, is_continued, plain_turns
from gateway.api.openai_request import Body
from gateway.api.responses_input import InputPart, content_text
from gateway.api.structured_fields import NOT_GIVEN, Found, structured_of_type
from gateway.api.tool_choice import Choice, Chosen, ToolChoice, call_needs_tools, chat_tool, function_of, tool_choice_of
from gateway.intake.wanted import ChatPrompt, Wanted
from gateway.tools.enforce import Function

_FORMAT = "output_config.format"
_CHOICES: Mapping[str, Choice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class Thinking(msgspec.Struct):
    type: str


class OutputFormat(msgspec.Struct):
    type: str
    schema: msgspec.Raw = NOT_GIVEN


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class ToolUse(msgspec.Struct):
    """The object of Anthropic's `tool_choice` field."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def chosen(self) -> Chosen:
        choice = _CHOICES.get(self.type)
        if choice is None:
            raise InvalidArgument.of("tool_choice.type", f"must be one of {', '.join(_CHOICES)}")
        if self.type == "tool" and self.name is None:
            raise InvalidArgument.of("tool_choice.name", "must be given")
        return Chosen(choice, self.name if self.type == "tool" else None, many=not self.disable_parallel_tool_use)


_ASKING = [name for name, choice in _CHOICES.items() if choice == "required"]
CALL_NEEDS_TOOLS = call_needs_tools(
    lambda choice: choice is not None and choice.type in _ASKING,
    {"type": "object", "required": ["type"], "properties": {"type": {"enum": _ASKING}}},
)


class CountTokensBody(Body, kw_only=True):
    """The body of POST /v1/messages/count_tokens: a conversation."""

    ignored = frozenset(
        ("metadata", "service_tier", "cache_control", "inference_geo", "user_profile_id", "workspace_id", "speed")
    )
    unsupported: ClassVar[Mapping[str, Any]] = {
        "container": None, "mcp_servers": [], "output_format": None, "context_management": None,
    }  # fmt: skip

    rules = (CALL_NEEDS_TOOLS,)

    messages: list[TurnBody]
    system: str | list[InputPart] | None = None
    thinking: Thinking | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolUse | None = None
    output_config: OutputConfig | None = None

    def prompt(self) -> ChatPrompt:
        """Returns the conversation as a prompt. Raises InvalidArgument if a field is invalid, and Unimplemented for
        thinking and for types of content that are not supported.
        """
        if self.thinking is not None and self.thinking.type != "disabled":
            raise Unimplemented.of("thinking.type", f"{self.thinking.type[:40]!r} is not supported yet")
        system = self.system
        first = [] if system is None else [{"role": "system", "content": content_text(system, "system")}]
        messages, names = plain_turns(self.messages)
        effort = None if self.output_config is None else self.output_config.effort
        return ChatPrompt(
            [*first, *messages],
            tools=[chat_tool(tool, "input_schema") for tool in self.tools or ()] or None,
            variables=effort_variable("output_config.effort", effort),
            continue_final_message=is_continued(messages[-1], names[-1]),
            names=["system"] * len(first) + names,
        )

    def structured(self) -> Found | None:
        """Returns the name of the field that requests a grammar, and the grammar, or None if the body requests no
        grammar. Raises InvalidArgument if the field is invalid.
        """
        form = None if self.output_config is None else self.output_config.format
        return None if form is None else structured_of_type(_FORMAT, form.type, "schema", form.schema)

    def chosen_tools(self) -> ToolChoice:
        """Returns the tools that may be called. Raises InvalidArgument if the tools or the choice are invalid."""
        functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(self.tools or ())]
        return tool_choice_of(functions, Chosen() if self.tool_choice is None else self.tool_choice.chosen())


class MessagesBody(CountTokensBody, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def all_wanted(self) -> list[Wanted]:
        """Returns the body's only request. Raises the errors of `prompt` and `structured`."""
        wanted = Wanted(stop=self.stop_sequences or (), prompt=self.prompt(), prompt_field="messages")
        if (found := self.structured()) is not None:
            wanted.structured_field, wanted.structured = found
        for name in ("model", "max_tokens", "temperature", "top_p", "top_k"):
            setattr(wanted, name, getattr(self, name))
        return [wanted]


def _function(name: str, tool: Mapping[str, Any]) -> Function:
    if tool.get("type") not in (None, "custom"):
        raise InvalidArgument.of(f"{name}.type", "must be custom; nothing else is supported")
    return function_of(name, tool, "input_schema")
