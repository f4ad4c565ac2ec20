"""Answers of POST /v1/responses: one message with one text, whole or as typed events. No I/O."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.errors import LooseleafError
from common.types import FinishReason
from gateway.api.openai_reply import account_of, dumps, error_body
from gateway.api.responses_request import ResponsesBody
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.wanted import Wanted
from gateway.request.delta import Delta, Summary


class ResponsesAnswer:
    """The answer to one body."""

    ending = b""
    field_names: Mapping[str, str] = {"max_tokens": "max_output_tokens", "messages": "input"}

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self.asking = body
        self.requests: list[ResolvedRequest] = []
        self._id, self._message_id = "resp_" + secrets.token_hex(24), "msg_" + secrets.token_hex(24)
        self._model = model
        self._created_at = int(time.time())
        self._text: list[str] = []
        self._finish: FinishReason | None = None
        self._summary: Summary | None = None
        self._number = 0
        """The sequence number of the next event."""

    def all_wanted(self) -> list[Wanted]:
        return self.asking.all_wanted()

    def take(self, requests: list[ResolvedRequest]) -> None:
        self.requests = requests

    def add(self, number: int, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._text.append(delta.text)
            self._finish = delta.finish_reason or self._finish
            self._summary = delta.summary or self._summary

    def whole(self) -> bytes:
        return dumps(self._ended())

    def error_object(self, error: LooseleafError) -> dict[str, Any]:
        return error_body(error)

    # --- events

    def events(self, number: int, deltas: Sequence[Delta]) -> bytes:
        found = b""
        for delta in deltas:
            self.add(number, [delta])
            found += b"".join(self._events(delta))
        return found

    def failure(self, error: LooseleafError) -> bytes:
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        failed = self._response("failed", error={"code": code, "message": error.message})
        return self._event("response.failed", response=failed)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if delta.is_first:
            yield from self._opening()
        if delta.text:
            yield self._part_event("response.output_text.delta", delta=delta.text, logprobs=[])
        if delta.finish_reason is not None:
            yield from self._closing()

    def _opening(self) -> Iterator[bytes]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        item = self._message("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part_event("response.content_part.added", part=_part(""))

    def _closing(self) -> Iterator[bytes]:
        text, ended = "".join(self._text), self._ended()
        yield self._part_event("response.output_text.done", text=text, logprobs=[])
        yield self._part_event("response.content_part.done", part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=ended["output"][0])
        yield self._event(f"response.{ended['status']}", response=ended)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    # --- objects

    def _ended(self) -> dict[str, Any]:
        assert self._summary is not None  # contained in the last delta
        status = "incomplete" if self._finish is FinishReason.LENGTH else "completed"
        response = self._response(status)
        response["output"] = [self._message(status, [_part("".join(self._text))])]
        response["incomplete_details"] = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response["usage"] = _usage(self._summary)
        response["looseleaf"] = account_of([self._summary])
        return response

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "type": "message", "id": self._message_id, "status": status, "role": "assistant", "content": content,
        }  # fmt: skip

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the response object. It states the parameters that are in effect."""
        body, sampling = self.asking, self.requests[0].sampling
        return {
            "id": self._id, "object": "response", "created_at": self._created_at, "status": status,
            "background": False, "error": error, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {}, "model": self._model,
            "output": [], "parallel_tool_calls": True, "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None}, "store": False, "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}}, "tool_choice": body.tool_choice or "auto", "tools": [],
            "top_p": sampling.top_p, "truncation": "disabled", "usage": None,
        }  # fmt: skip


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(summary: Summary) -> dict[str, Any]:
    return {
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": {"cached_tokens": summary.sources.cached},
        "output_tokens": summary.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    }
