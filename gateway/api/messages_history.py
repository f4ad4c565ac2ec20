"""Converts the `messages` of POST /v1/messages to the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from common.errors import InvalidArgument, Unimplemented
from gateway.api.responses_input import InputPart, check_parts, content_text, given

BLOCKS: Mapping[str, Sequence[str]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
"""The types of blocks that messages of each role may contain."""


class ContentBlock(msgspec.Struct):
    """A block of a message's content. Its type determines which fields it needs."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputPart] | None = None
    thinking: str | None = None


class TurnBody(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[ContentBlock]


def plain_turns(turns: Sequence[TurnBody]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the messages for a chat template and, for each, the field of the body from which it comes. Tool results,
    which are blocks of a user message, become separate messages.

    Raises InvalidArgument for an invalid message, and Unimplemented for a block whose type is not supported.
    """
    if not turns:
        raise InvalidArgument.of("messages", "must hold at least one message")
    check_parts("messages", [turn.content for turn in turns])
    messages: list[dict[str, Any]] = []
    names: list[str] = []
    for index, turn in enumerate(turns):
        name = f"messages[{index}]"
        found = list(_plain(turn, name))
        messages += found
        names += [name] * len(found)
    return messages, names


def is_continued(message: Mapping[str, Any], name: str) -> bool:
    """Returns whether the output continues a conversation's last message. It does so if this is a text of the
    assistant. Raises InvalidArgument if the text ends with white space, which Anthropic's API does not accept either.
    """
    if message["role"] != "assistant" or not message["content"] or "tool_calls" in message:
        return False
    if message["content"][-1].isspace():
        raise InvalidArgument.of(f"{name}.content", "must not end with white space, because the answer continues it")
    return True


def _plain(turn: TurnBody, name: str) -> Iterator[dict[str, Any]]:
    if turn.role not in BLOCKS:
        raise InvalidArgument.of(f"{name}.role", f"must be one of {', '.join(BLOCKS)}")
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    for index, block in enumerate(turn.content):
        if block.type not in BLOCKS[turn.role]:
            what = f"{block.type[:40]!r} is not supported here"
            raise Unimplemented.of(f"{name}.content[{index}].type", what)
    if turn.role == "assistant":
        yield _answer(turn.content, f"{name}.content")
    else:
        yield from _question(turn.content, f"{name}.content")


def _answer(blocks: Sequence[ContentBlock], name: str) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(blocks):
        own = f"{name}[{index}]"
        if block.type == "text":
            texts.append(_text(block, own))
        elif block.type == "tool_use":
            function = {"name": given(block.name, f"{own}.name"), "arguments": block.input or {}}
            calls.append({"id": given(block.id, f"{own}.id"), "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if calls:
        message["tool_calls"] = calls
    return message | ({"reasoning_content": "".join(thoughts)} if any(thoughts) else {})


def _question(blocks: Sequence[ContentBlock], name: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    for index, block in enumerate(blocks):
        own = f"{name}[{index}]"
        if block.type == "text":
            texts.append(_text(block, own))
        else:
            if texts:
                yield {"role": "user", "content": "".join(texts)}
                texts = []
            yield _result(block, own)
    if texts or not blocks:
        yield {"role": "user", "content": "".join(texts)}


def _result(block: ContentBlock, name: str) -> dict[str, Any]:
    text = content_text(block.content or "", f"{name}.content")
    return {"role": "tool", "tool_call_id": given(block.tool_use_id, f"{name}.tool_use_id"), "content": text}


def _text(block: ContentBlock, name: str) -> str:
    if block.text is None:
        raise InvalidArgument.of(f"{name}.text", "must be given")
    return block.text
