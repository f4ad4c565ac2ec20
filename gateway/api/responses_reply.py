"""Builds answers to POST /v1/responses: items of text, reasoning and calls, complete or as events. This module does no
I/O.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from common.errors import LooseleafError
from common.types import FinishReason
from gateway.api.answer_blocks import Block, BlockAnswer, Change
from gateway.api.chat_plan import ChatPlanner
from gateway.api.openai_reply import account_of, dumps, error_body
from gateway.api.responses_request import ResponsesBody
from gateway.request.delta import Delta, Summary

_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
_EVENTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
"""The middle part of the event names for a block's text, by kind of block."""


class ResponsesAnswer(BlockAnswer):
    """The answer to one body of POST /v1/responses."""

    field_names: Mapping[str, str] = {"max_tokens": "max_output_tokens", "messages": "input"}

    def __init__(self, body: ResponsesBody, model: str, planner: ChatPlanner) -> None:
        super().__init__(body, planner)
        self._asked = body
        self._id = "resp_" + secrets.token_hex(24)
        self._model = model
        self._created_at = int(time.time())
        self._number = 0
        """The sequence number of the next event."""

    def whole(self) -> list[bytes]:
        return [dumps(self._ended())]

    def error_object(self, error: LooseleafError) -> dict[str, Any]:
        return error_body(error)

    # --- events

    def events(self, number: int, deltas: Sequence[Delta]) -> bytes:
        return b"".join(event for delta in deltas for event in self._events(delta))

    def failure(self, error: LooseleafError) -> bytes:
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        failed = self._response("failed", error={"code": code, "message": error.message})
        return self._event("response.failed", response=failed)

    def _events(self, delta: Delta) -> Iterator[bytes]:
        if delta.is_first:
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", response=self._response("in_progress"))
        for change in self.read(delta):
            yield from {"open": self._opened, "grow": self._grown, "close": self._closed}[change.what](change)
        if delta.finish_reason is not None:
            ended = self._ended()
            yield self._event(f"response.{ended['status']}", response=ended)

    def _opened(self, change: Change) -> Iterator[bytes]:
        block = change.block
        item = self._item(block, "in_progress")
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            yield self._block_event("response.content_part.added", block, part=_part(block, ""))

    def _grown(self, change: Change) -> Iterator[bytes]:
        more: dict[str, Any] = {"logprobs": []} if change.block.kind == "text" else {}
        kind = f"response.{_EVENTS[change.block.kind]}.delta"
        yield self._block_event(kind, change.block, delta=change.text, **more)

    def _closed(self, change: Change) -> Iterator[bytes]:
        block, kind = change.block, f"response.{_EVENTS[change.block.kind]}.done"
        if block.kind == "call":
            yield self._block_event(kind, block, name=block.name, arguments=block.text)
        else:
            yield self._block_event(kind, block, text=block.text, **({"logprobs": []} if block.kind == "text" else {}))
            yield self._block_event("response.content_part.done", block, part=_part(block, block.text))
        item = self._item(block, self._status_of(block))
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _block_event(self, kind: str, block: Block, **fields: Any) -> bytes:
        part = {} if block.kind == "call" else {"content_index": 0}
        return self._event(kind, item_id=_id_of(block), output_index=block.index, **part, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = json.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return f"event: {kind}\ndata: {data}\n\n".encode()

    # --- objects

    @property
    def _is_incomplete(self) -> bool:
        return self.last.finish_reason is FinishReason.LENGTH

    def _status_of(self, block: Block) -> str:
        """Returns the status of a closed block. Only the last block can be incomplete."""
        return "incomplete" if self._is_incomplete and block is self.blocks.all[-1] else "completed"

    def _ended(self) -> dict[str, Any]:
        assert self.last.summary is not None  # contained in the last delta
        response = self._response("incomplete" if self._is_incomplete else "completed")
        response["output"] = [self._item(block, self._status_of(block)) for block in self.blocks.all]
        response["incomplete_details"] = {"reason": "max_output_tokens"} if self._is_incomplete else None
        response["usage"] = _usage(self.last.summary, self.reasoning_tokens)
        response["looseleaf"] = account_of([self.last.summary])
        return response

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """Returns a block as an item of the output. An item has no content while it is in progress."""
        item: dict[str, Any] = {"id": _id_of(block), "status": status}
        if block.kind == "call":
            arguments = "" if status == "in_progress" else block.text
            call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return {"type": "function_call", **item, **call}
        content = [] if status == "in_progress" else [_part(block, block.text)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the response object, with the parameters of the request and no output."""
        body, sampling = self._asked, self.requests[0].sampling
        return {
            "id": self._id, "object": "response", "created_at": self._created_at, "status": status,
            "background": False, "error": error, "incomplete_details": None, "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens, "metadata": body.metadata or {}, "model": self._model,
            "output": [], "parallel_tool_calls": body.parallel_tool_calls is not False, "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False, "temperature": sampling.temperature, "text": {"format": _format_of(body)},
            "tool_choice": body.tool_choice or "auto", "top_p": sampling.top_p, "truncation": "disabled",
            "tools": [{"parameters": None, "strict": False, **tool} for tool in body.tools or ()], "usage": None,
        }  # fmt: skip


def _id_of(block: Block) -> str:
    return _PREFIXES[block.kind] + block.secret


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _format_of(body: ResponsesBody) -> dict[str, Any]:
    form = None if body.text is None else body.text.format
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    optional = {"description": form.description} if form.description is not None else {}
    schema = msgspec.json.decode(form.schema)
    return {"type": "json_schema", "name": form.name or "", "schema": schema, "strict": True, **optional}


def _usage(summary: Summary, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": {"cached_tokens": summary.sources.cached},
        "output_tokens": summary.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    }
