"""Builds answers to POST /v1/messages, complete or as events, and errors, all in Anthropic's format. This module does
no I/O.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.errors import LooseleafError
from common.request_ids import REQUEST_ID
from common.types import FinishReason, PromptSources
from gateway.api.answer_blocks import Block, BlockAnswer, Change
from gateway.api.chat_plan import ChatPlanner
from gateway.api.messages_request import MessagesBody
from gateway.api.openai_reply import account_of, dumps
from gateway.request.delta import Delta, Summary

_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip

_DELTAS = {
    "text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}  # fmt: skip
"""For each kind of block, the type of its deltas and the key of their text."""


def messages_error(error: LooseleafError) -> dict[str, Any]:
    """Returns an error in the format of Anthropic's API."""
    kind = _ERROR_TYPES.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": REQUEST_ID.get()}


class MessagesAnswer(BlockAnswer):
    """The answer to one body of POST /v1/messages."""

    field_names: Mapping[str, str] = {"stop": "stop_sequences", "continue_final_message": "messages"}

    def __init__(self, body: MessagesBody, model: str, planner: ChatPlanner) -> None:
        super().__init__(body, planner)
        self._id = "msg_" + secrets.token_hex(12)
        self._model = model

    def whole(self) -> list[bytes]:
        assert self.last.summary is not None  # contained in the last delta
        summary = self.last.summary
        message = self._message([_content(block) for block in self.blocks.all], _usage_of(summary))
        return [dumps({**message, **self._ending(), "looseleaf": account_of([summary])})]

    def error_object(self, error: LooseleafError) -> dict[str, Any]:
        return messages_error(error)

    # --- events

    def events(self, number: int, deltas: Sequence[Delta]) -> bytes:
        return b"".join(event for delta in deltas for event in self._events(delta))

    def failure(self, error: LooseleafError) -> bytes:
        return _event("error", **{name: value for name, value in messages_error(error).items() if name != "type"})

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if delta.is_first:
            assert delta.sources is not None  # contained in the only sample's first delta
            usage = _usage(len(self.requests[0].prompt_ids), delta.sources, len(delta.token_ids))
            yield _event("message_start", message=self._message([], usage))
        for change in self.read(delta):
            yield _block_event(change)
        if delta.finish_reason is not None:
            assert delta.summary is not None  # contained in the only sample's last delta
            account, usage = account_of([delta.summary]), _usage_of(delta.summary)
            yield _event("message_delta", delta=self._ending(), usage=usage, looseleaf=account)
            yield _event("message_stop")

    def _ending(self) -> dict[str, Any]:
        if self.last.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self.last.stop_string}
        ended = "tool_use" if self.ended_with_calls else "end_turn"
        reason = "max_tokens" if self.last.finish_reason is FinishReason.LENGTH else ended
        return {"stop_reason": reason, "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _block_event(change: Change) -> bytes:
    block = change.block
    if change.what == "open":
        return _event("content_block_start", index=block.index, content_block=_empty(block))
    if change.what == "close":
        return _event("content_block_stop", index=block.index)
    kind, key = _DELTAS[block.kind]
    return _event("content_block_delta", index=block.index, delta={"type": kind, key: change.text})


def _empty(block: Block) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _content(block: Block) -> dict[str, Any]:
    """Returns a block of a complete answer. A call's `input` is empty if its arguments are not a JSON object."""
    if block.kind == "call":
        return {**_empty(block), "input": _object(block.text)}
    return {**_empty(block), "thinking" if block.kind == "reasoning" else "text": block.text}


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {}


def _usage_of(summary: Summary) -> dict[str, Any]:
    return _usage(summary.prompt_tokens, summary.sources, summary.completion_tokens)


def _usage(prompt_tokens: int, sources: PromptSources, output_tokens: int) -> dict[str, Any]:
    """Returns the usage. As in Anthropic's API, `input_tokens` does not include tokens that were found in the cache."""
    return {
        "input_tokens": prompt_tokens - sources.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": sources.cached,
        "output_tokens": output_tokens,
    }
