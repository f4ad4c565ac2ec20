"""Renders messages and tools to a prompt with a model's chat template, as `apply_chat_template` in transformers does.

A template is one of the model's files; messages, tools and variables come from clients. The template therefore runs in
a sandbox, without access to other objects of the gateway, and within a limit on CPU time. The limit is checked between
pieces of the template's output, so it does not stop a loop that outputs nothing.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import InvalidArgument, StartupError
from gateway.intake.limits import MAX_PROMPT_BYTES, MAX_TEMPLATE_CPU_S

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names that templates use for the reasoning in an earlier answer."""
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marker for the end of a message that the output continues. Transformers uses the same text."""


class _Refused(TemplateError):
    """The error that a template raises with `raise_exception`. The template chooses the message, which is sent to the
    client.
    """


class _Generation(Extension):
    """A Jinja extension that ignores `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `render` may be called from any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            names = environment.parse(source).find_all(nodes.Name)
            self.takes_tools = any(name.name == "tools" and name.ctx == "load" for name in names)
            """Whether the template reads the variable `tools`."""
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise StartupError(f"the model's chat template is not valid Jinja: {str(error)[:200]}") from None
        self.takes_calls = "tool_calls" in source
        """Whether the template writes the tool calls of earlier answers. This is assumed if its source contains
        `tool_calls`.
        """
        self.own_names = frozenset((*environment.globals, *special_tokens, *_OWN_NAMES))
        """The names of variables that clients cannot set."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt. With `add_generation_prompt`, the prompt ends where the assistant's answer begins. With
        `continue_final_message`, the prompt ends with the text of the last message.

        Raises InvalidArgument if the template refuses the messages, fails or exceeds a limit.
        """
        prepared = [_prepared(message) for message in messages]
        if continue_final_message:
            prepared[-1]["content"] += _CONTINUED
        given = {**self._special_tokens, **(variables or {})}
        given |= {
            "messages": prepared,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        text = self._rendered(given)
        if continue_final_message:
            text = _continued(text, messages[-1]["content"])
        _check_unicode(text)
        return text

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        until = time.thread_time() + MAX_TEMPLATE_CPU_S
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if time.thread_time() > until:
                    raise InvalidArgument.of(
                        "messages", f"need more than {MAX_TEMPLATE_CPU_S * 1000:.0f} ms in the chat template"
                    )
                if size > MAX_PROMPT_BYTES:
                    raise InvalidArgument.of("messages", f"must be at most {MAX_PROMPT_BYTES} bytes as a prompt")
        except _Refused as error:
            raise InvalidArgument.of(
                "messages", f"are refused by the model's chat template: {str(error)[:200]}"
            ) from None
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError, AttributeError):
            raise InvalidArgument.of("messages", "cannot be rendered by the model's chat template") from None
        return "".join(pieces)


_OWN_NAMES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a message without the keys whose value is None, and with its reasoning under the names that
    templates use.
    """
    copy = {key: value for key, value in message.items() if value is not None}
    reasoning = next((copy[name] for name in _REASONING if name in copy), None)
    return copy if reasoning is None else {"thinking": reasoning, **copy, "reasoning_content": reasoning}


def _continued(text: str, content: str) -> str:
    """Returns the prompt up to the end of the last message. Raises InvalidArgument if the template changed the
    message.
    """
    tag = _CONTINUED.strip()
    end = text.rfind(tag)
    if end < 0 or content.strip() not in text:
        raise InvalidArgument.of(
            "continue_final_message", "cannot be used: the model's chat template changes the final message"
        )
    cut = text[:end]
    return cut if text.startswith(_CONTINUED, end) else cut.rstrip()


def _check_unicode(text: str) -> None:
    """Raises InvalidArgument for a lone surrogate, which JSON can express but Unicode does not allow."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument.of("messages", "must be valid Unicode; the prompt contains a lone surrogate") from None


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
