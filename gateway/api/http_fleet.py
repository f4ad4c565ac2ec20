"""Serves the HTTP endpoints about workers and blocks, for the page and for operators.

Every caller with a key sees loads and the states of blocks. Only operators see prefix hashes and holders.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidArgument, LooseleafError, NotFound, ResourceExhausted, Unavailable
from gateway.api.answer import renamed
from gateway.api.asgi import EventSender, EventStream
from gateway.api.http_about import json_response
from gateway.api.openai_reply import dumps, error_body
from gateway.fleet.block_counts import STATES
from gateway.fleet.block_maps import BlockMaps
from gateway.fleet.worker_state import WorkerState
from gateway.fleet.workers import Workers
from protos.v1 import block_store_pb2 as pb

MOST_CELLS = 200_000
"""The largest number of blocks whose states are sent. For a larger arena, the state of every k-th block is sent."""
MOST_WATCHERS = 16
COMPARED = 1024
"""Number of states that are compared at a time. Single states are compared only if these differ."""
IDLE_S = 5.0
"""Time in seconds without a change after which an event without states shows a watcher that the gateway is alive."""
DELTA_S = 0.1


@dataclass(frozen=True, slots=True)
class FleetView:
    """The objects whose state the endpoints return."""

    workers: Workers
    maps: BlockMaps
    is_operator: Callable[[str], bool]
    """Returns whether a tenant may see prefix hashes and holders."""
    is_leaving: Callable[[], bool] = lambda: False
    """Returns whether the gateway is shutting down, which ends the streams."""


class FleetApi:
    """The endpoints /v1/workers and /v1/blocks."""

    def __init__(
        self, view: FleetView, tenant_of: Callable[[Request], str], on_error: Callable[[LooseleafError], None]
    ) -> None:
        self._view = view
        self._tenant_of = tenant_of
        self._on_error = on_error
        self._num_watchers = 0

    async def workers(self, request: Request) -> Response:
        """Returns the workers with their loads, and the arenas with their counts and, for operators, their holders."""
        is_operator, now = self._view.is_operator(self._tenant_of(request)), time.monotonic()
        known, maps = self._view.workers, self._view.maps
        workers = [_worker(state, now, known.failed(state.record)) for state in known.states.values()]
        replies = await asyncio.gather(*(self._counts(index) for index in range(len(maps.addresses))))
        return json_response({"workers": workers, "arenas": [_arena(reply, is_operator) for reply in replies]})

    async def _counts(self, index: int) -> pb.InspectResponse:
        """Returns the counts of an arena. If its store does not answer, the arena is empty and has no id, so that the
        other arenas keep their numbers.
        """
        try:
            return await self._view.maps.counts(index)
        except (NotFound, Unavailable):
            return pb.InspectResponse()

    async def block(self, request: Request) -> Response:
        """Returns one block of an arena."""
        is_operator = self._view.is_operator(self._tenant_of(request))
        number = _number(request.path_params["block"], "block")
        try:
            reply = await self._view.maps.blocks(_index(request), [number])
        except InvalidArgument as error:
            raise renamed(error, {"blocks": "block"}) from None
        if not reply.blocks:
            raise NotFound("there is no arena yet: no worker has attached")
        names = {holder.epoch: holder.name for holder in reply.holders}
        return json_response(_block(reply.blocks[0], names, is_operator))

    async def watch(self, request: Request) -> Response:
        """Streams the states of an arena's blocks: first all states, then the changes, at most ten times a second. For
        an arena of more than `MOST_CELLS` blocks, only every k-th block is included.
        """
        self._tenant_of(request)
        index = _index(request)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._num_watchers >= MOST_WATCHERS:
            raise ResourceExhausted(f"at most {MOST_WATCHERS} may watch blocks at once", retry_after_s=1.0)
        at_end = ExitStack()
        self._num_watchers += 1
        at_end.callback(self._left)
        return EventStream(partial(self._send, request, index), _Form(), self._on_error, at_end)

    def _left(self) -> None:
        self._num_watchers -= 1

    async def _send(self, request: Request, index: int, sender: EventSender) -> None:
        before, sent_at = b"", 0.0
        while not self._view.is_leaving():
            self._tenant_of(request)  # the key may have been revoked
            reply = await self._view.maps.states(index)
            stride = max(1, -(-len(reply.states) // MOST_CELLS))
            states = reply.states[::stride]
            event = _change(before, states)
            if event is not None or time.monotonic() - sent_at > IDLE_S:
                arena = {"stride": stride, **_arena(reply, is_operator=False)}
                await sender.send(b"data: " + dumps({**arena, **(event or {})}) + b"\n\n")
                before, sent_at = states, time.monotonic()
            await asyncio.sleep(DELTA_S)


class _Form:
    """The form in which a stream of states ends."""

    ending = b""

    def failure(self, error: LooseleafError) -> bytes:
        return b"data: " + dumps(error_body(error)) + b"\n\n"

    def error_object(self, error: LooseleafError) -> dict[str, Any]:
        return error_body(error)


def _change(before: bytes, states: bytes) -> dict[str, Any] | None:
    """Returns all states as base64, with one byte per block, if their number has changed. Otherwise, returns the
    changed states, or None if no state has changed.
    """
    if len(before) != len(states):
        return {"states": base64.b64encode(states).decode()}
    changed = list(_changed(before, states))
    return {"changed": changed, "to": [states[place] for place in changed]} if changed else None


def _changed(before: bytes, states: bytes) -> Iterator[int]:
    """Yields the positions at which the states differ. Compares runs of `COMPARED` states first, because most runs are
    equal.
    """
    for start in range(0, len(states), COMPARED):
        old, new = before[start : start + COMPARED], states[start : start + COMPARED]
        if old != new:
            yield from (start + i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)


def _worker(state: WorkerState, now: float, is_avoided: bool) -> dict[str, Any]:
    record, load = state.record, state.load
    return {
        "worker_id": record.worker_id,
        "role": record.role,
        "arena_id": record.arena_id,
        "draining": record.draining,
        "avoided": is_avoided,
        "max_num_seqs": record.max_num_seqs,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_preempted": load.num_preempted,
        "waiting_tokens": state.tokens_before(now),
        "prompt_tokens_per_s": load.prompt_tokens_per_s,
        "fallbacks": sum(record.fallbacks.values()),
    }


def _arena(reply: pb.InspectResponse, is_operator: bool) -> dict[str, Any]:
    found = {
        "arena_id": reply.arena_id,
        "num_blocks": reply.num_blocks,
        "block_size": reply.block_size,
        "block_bytes": reply.block_bytes,
        "counts": {state: getattr(reply, state) for state in STATES},
    }
    if is_operator:
        found["holders"] = [
            {"name": h.name, "num_references": h.num_references, "lease_ms": h.lease_ms, "floor_blocks": h.floor_blocks}
            for h in reply.holders
        ]
    return found


def _block(block: pb.BlockInfo, names: dict[int, str], is_operator: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "block": block.block,
        "state": pb.BlockState.Name(block.state).removeprefix("BLOCK_STATE_").lower(),
        "generation": str(block.generation),  # JavaScript's numbers have 53 bits
        "num_holders": len(block.holders),
    }
    if is_operator:
        found["prefix_hash"] = block.prefix_hash.hex()
        found["holders"] = [names.get(epoch, f"epoch {epoch}") for epoch in block.holders]
    return found


def _index(request: Request) -> int:
    return _number(request.query_params.get("arena", "0"), "arena")


def _number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InvalidArgument.of(name, f"must be an integer from 0, got {text[:20]!r}")
    return int(text)
