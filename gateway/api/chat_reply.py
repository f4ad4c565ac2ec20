"""Builds the message of a chat's answer, complete or in deltas, with reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gateway.tools.formats import CallIds
from gateway.tools.output_reader import OutputReader
from gateway.tools.pieces import CallArguments, CallBegin, Content, Piece, Reasoning


def message_of(text: str, reader: OutputReader | None, ids: CallIds) -> dict[str, Any]:
    """Returns the message of a complete answer. The message's `content` is `null` if it has tool calls and no text."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if reader is None:
        return message
    pieces = reader.feed(text) + reader.finish()
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls = [_call(ids, piece, pieces) for piece in pieces if isinstance(piece, CallBegin)]
    message["content"] = content or (None if calls else "")
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(ids: CallIds, begin: CallBegin, pieces: Sequence[Piece]) -> dict[str, Any]:
    arguments = "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == begin.index)
    return {"id": ids.next(begin.call_id), "type": "function", "function": {"name": begin.name, "arguments": arguments}}


def deltas_of(pieces: Sequence[Piece], ids: CallIds) -> Iterator[dict[str, Any]]:
    """Yields a streamed message's deltas for these pieces. The first delta of a call has the call's id, type and
    name.
    """
    for piece in pieces:
        if isinstance(piece, Content):
            yield {"content": piece.text}
        elif isinstance(piece, Reasoning):
            yield {"reasoning_content": piece.text}
        elif isinstance(piece, CallBegin):
            function = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": ids.next(piece.call_id), "type": "function", "function": function}
            yield {"tool_calls": [call]}
        else:
            yield {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
