"""Defines the body of POST /v1/responses (OpenAI's Responses API). Each request contains the whole conversation,
because nothing is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec

from common.errors import InvalidArgument, Unimplemented
from gateway.api.chat_fields import CALL_NEEDS_TOOLS, effort_variable
from gateway.api.openai_request import Body, logit_bias_of
from gateway.api.responses_input import InputItem, plain_items
from gateway.api.structured_fields import NOT_GIVEN, Found, structured_of_type
from gateway.api.tool_choice import ToolChoice, chat_tool, chosen_of, function_of, tool_choice_of
from gateway.api.vllm_fields import UNSUPPORTED
from gateway.intake.wanted import ChatPrompt, Wanted
from gateway.tools.enforce import Function

_NOTHING_STORED = "cannot be used: nothing is stored here; send the whole conversation as input"
WITHOUT_EFFECT = ("reasoning.encrypted_content",)
"""Values of `include` that are accepted and have no effect."""


class TextFormat(msgspec.Struct):
    """The required form of the text: any text, a JSON object, or JSON that matches a schema."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = NOT_GIVEN
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Body, kw_only=True):
    """The body of POST /v1/responses. `store` has no effect: nothing is stored."""

    ignored = frozenset(
        (
            "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
            "stream_options", "max_tool_calls",
        )
    )  # fmt: skip
    unsupported: ClassVar[Mapping[str, Any]] = {
        "structured_outputs": None, "guided_json": None, "guided_regex": None, "guided_choice": None,
        "guided_grammar": None, "guided_decoding_backend": None,
        **UNSUPPORTED,
        "background": False, "conversation": None, "prompt": None, "top_logprobs": 0,
        "truncation": "disabled", "context_management": None,
    }  # fmt: skip

    rules = (CALL_NEEDS_TOOLS,)

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    # vLLM's fields
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    def all_wanted(self) -> list[Wanted]:
        """Returns the body's only request. Raises InvalidArgument if a field is invalid, and Unimplemented for an
        option or a type of content that is not supported.
        """
        self._check()
        wanted = Wanted(stop=[self.stop] if isinstance(self.stop, str) else self.stop or ())
        for name in _PLAIN:
            setattr(wanted, name, getattr(self, name))
        wanted.prompt, wanted.prompt_field = self._prompt(), "input"
        if found := self._structured():
            wanted.structured_field, wanted.structured = found
        wanted.max_tokens = self.max_output_tokens
        wanted.logit_bias = logit_bias_of(self.logit_bias or {})
        wanted.stop_token_ids = self.stop_token_ids or ()
        wanted.ignore_eos = bool(self.ignore_eos)
        wanted.skip_special_tokens = self.skip_special_tokens is not False
        return [wanted]

    def _check(self) -> None:
        """Raises Unimplemented for options that are known but not supported."""
        if self.previous_response_id is not None:
            raise Unimplemented.of("previous_response_id", _NOTHING_STORED)
        for index, item in enumerate(self.include or ()):
            if item not in WITHOUT_EFFECT:
                raise Unimplemented.of(f"include[{index}]", f"{item[:60]!r} is not supported yet")

    def chosen_tools(self) -> ToolChoice:
        """Returns the tools that may be called. Raises InvalidArgument if the tools or the choice are invalid."""
        functions = [_function(f"tools[{index}]", tool) for index, tool in enumerate(self.tools or ())]
        chosen = chosen_of(self.tool_choice, lambda choice: choice.get("name"), '{"type": "function", "name": ...}')
        return tool_choice_of(functions, replace(chosen, many=self.parallel_tool_calls is not False))

    def _structured(self) -> Found | None:
        form = None if self.text is None else self.text.format
        return None if form is None else structured_of_type("text.format", form.type, "schema", form.schema)

    def _prompt(self) -> ChatPrompt:
        first = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        effort = None if self.reasoning is None else self.reasoning.effort
        if self.input == "":
            raise InvalidArgument.of("input", "must not be empty")
        if isinstance(self.input, str):
            messages, names = [{"role": "user", "content": self.input}], ["input"]
        else:
            messages, names = plain_items(self.input)
        return ChatPrompt(
            [*first, *messages],
            tools=[chat_tool(tool) for tool in self.tools or ()] or None,
            variables=effort_variable("reasoning.effort", effort),
            names=["instructions"] * len(first) + names,
        )


def _function(name: str, tool: Mapping[str, Any]) -> Function:
    if tool.get("type") != "function":
        raise InvalidArgument.of(f"{name}.type", "must be function; nothing else is supported")
    return function_of(name, tool)


_PLAIN = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_tokens", "cache_salt", "priority", "request_id", "truncate_prompt_tokens",
)  # fmt: skip
