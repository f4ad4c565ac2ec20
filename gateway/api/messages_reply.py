"""Answers of POST /v1/messages: one text block, whole or as Anthropic's events, and its errors. No I/O."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.errors import LooseleafError
from common.request_ids import REQUEST_ID
from common.types import FinishReason
from gateway.api.messages_request import MessagesBody
from gateway.api.openai_reply import account_of, dumps
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.wanted import Wanted
from gateway.request.delta import Delta, Summary

_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def messages_error(error: LooseleafError) -> dict[str, Any]:
    """Returns Anthropic's error object."""
    kind = _ERROR_TYPES.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": REQUEST_ID.get()}


class MessagesAnswer:
    """The answer to one body."""

    ending = b""
    field_names: Mapping[str, str] = {"stop": "stop_sequences"}

    def __init__(self, body: MessagesBody, model: str) -> None:
        self.asking = body
        self.requests: list[ResolvedRequest] = []
        self._id = "msg_" + secrets.token_hex(12)
        self._model = model
        self._text: list[str] = []
        self._last: Delta | None = None

    def all_wanted(self) -> list[Wanted]:
        return self.asking.all_wanted()

    def take(self, requests: list[ResolvedRequest]) -> None:
        self.requests = requests

    def add(self, number: int, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._text.append(delta.text)
            self._last = delta if delta.finish_reason is not None else self._last

    def whole(self) -> bytes:
        assert self._last is not None and self._last.summary is not None  # contained in the last delta
        summary = self._last.summary
        message = self._message([{"type": "text", "text": "".join(self._text)}], _usage(summary))
        return dumps({**message, **_ending(self._last), "looseleaf": account_of([summary])})

    def error_object(self, error: LooseleafError) -> dict[str, Any]:
        return messages_error(error)

    # --- events

    def events(self, number: int, deltas: Sequence[Delta]) -> bytes:
        return b"".join(event for delta in deltas for event in self._events(delta))

    def failure(self, error: LooseleafError) -> bytes:
        return _event("error", **{name: value for name, value in messages_error(error).items() if name != "type"})

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if delta.is_first:
            usage = {"input_tokens": len(self.requests[0].prompt_ids), "output_tokens": len(delta.token_ids)}
            yield _event("message_start", message=self._message([], usage))
            yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if delta.text:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": delta.text})
        if delta.finish_reason is not None:
            assert delta.summary is not None  # contained in the only sample's last delta
            yield _event("content_block_stop", index=0)
            account = account_of([delta.summary])
            yield _event("message_delta", delta=_ending(delta), usage=_usage(delta.summary), looseleaf=account)
            yield _event("message_stop")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _ending(last: Delta) -> dict[str, Any]:
    if last.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_string}
    reason = "max_tokens" if last.finish_reason is FinishReason.LENGTH else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(summary: Summary) -> dict[str, Any]:
    """Returns the usage. As in Anthropic's API, `input_tokens` does not include tokens that were found in the cache."""
    return {
        "input_tokens": summary.prompt_tokens - summary.sources.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": summary.sources.cached,
        "output_tokens": summary.completion_tokens,
    }
