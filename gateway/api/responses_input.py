"""Converts the `input` of POST /v1/responses to the form that chat templates expect: messages, reasoning, and tool
calls and their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import InvalidArgument, Unimplemented
from gateway.api.chat_messages import call_arguments
from gateway.intake.limits import MAX_CONTENT_PARTS

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
REASONING_PART = "reasoning_text"


class InputPart(msgspec.Struct):
    """A part of a message's content. Clients may send back parts of answers. The other fields of such parts are
    ignored.
    """

    type: str
    text: str | None = None


class InputItem(msgspec.Struct):
    """An item of the input. Its type determines which fields it needs."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


def plain_items(items: Sequence[InputItem]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the messages for a chat template and, for each, the field of the body from which it comes. The reasoning,
    the text and the calls of an answer, which are separate items in this order, become one message.

    Raises InvalidArgument for an invalid item, and Unimplemented for an item or a part whose type is not supported.
    """
    check_parts("input", [item.content for item in items] + [item.output for item in items])
    if not items:
        raise InvalidArgument.of("input", "must hold at least one item")
    history = _History()
    for index, item in enumerate(items):
        history.add(item, f"input[{index}]")
    return history.messages, history.names


def check_parts(name: str, contents: Sequence[object]) -> None:
    """Raises InvalidArgument for too many parts of content."""
    if sum(len(content) for content in contents if isinstance(content, list)) > MAX_CONTENT_PARTS:
        raise InvalidArgument.of(name, f"must hold at most {MAX_CONTENT_PARTS} parts of content")


def text_of(parts: Sequence[InputPart], name: str, kinds: Sequence[str] = TEXT_PARTS) -> str:
    """Returns the text of a message's parts. `name` identifies the list of parts in error messages.

    Raises Unimplemented for a part that is not one of `kinds`, and InvalidArgument for a part without text.
    """
    texts: list[str] = []
    for index, part in enumerate(parts):
        if part.type not in kinds:
            what = f"{part.type[:40]!r} is not supported: the model reads text only"
            raise Unimplemented.of(f"{name}[{index}].type", what)
        if part.text is None:
            raise InvalidArgument.of(f"{name}[{index}].text", "must be given")
        texts.append(part.text)
    return "".join(texts)


class _History:
    """The list of the messages that have been converted, with the fields of the body from which they come."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: list[str] = []
        self._reasoning: str | None = None
        """Reasoning that belongs to the next message of the assistant."""

    def add(self, item: InputItem, name: str) -> None:
        if item.type == "message":
            self._message(item, name)
        elif item.type == "function_call":
            self._call(item, name)
        elif item.type == "function_call_output":
            call_id = given(item.call_id, f"{name}.call_id")
            self._append(
                {"role": "tool", "tool_call_id": call_id, "content": content_text(item.output, f"{name}.output")}, name
            )
        elif item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            self._reasoning = text_of(parts, f"{name}.content", (REASONING_PART,)) or None
        else:
            raise Unimplemented.of(f"{name}.type", f"{item.type[:40]!r} is not supported")

    def _message(self, item: InputItem, name: str) -> None:
        if item.role is None or item.role not in ROLES:
            raise InvalidArgument.of(f"{name}.role", f"must be one of {', '.join(ROLES)}")
        self._append({"role": item.role, "content": content_text(item.content, f"{name}.content")}, name)

    def _call(self, item: InputItem, name: str) -> None:
        arguments = call_arguments(f"{name}.arguments", item.arguments)
        function = {"name": given(item.name, f"{name}.name"), "arguments": arguments}
        call = {"id": given(item.call_id, f"{name}.call_id"), "type": "function", "function": function}
        if self._reasoning is not None or not self.messages or self.messages[-1]["role"] != "assistant":
            self._append({"role": "assistant", "content": None}, name)
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _append(self, message: dict[str, Any], name: str) -> None:
        if message["role"] == "assistant" and self._reasoning is not None:
            message["reasoning_content"], self._reasoning = self._reasoning, None
        self.messages.append(message)
        self.names.append(name)


def content_text(content: str | list[InputPart] | None, name: str) -> str:
    """Returns the text of a message's content. Raises InvalidArgument if there is no content or a part has no text, and
    Unimplemented for a part that is not text.
    """
    if content is None:
        raise InvalidArgument.of(name, "must be given")
    return content if isinstance(content, str) else text_of(content, name)


def given(value: str | None, name: str) -> str:
    """Returns a name or an id. Raises InvalidArgument, which names the field, if the value is missing or empty."""
    if not value:
        raise InvalidArgument.of(name, "must be given")
    return value
