"""Serves the HTTP endpoints that load and unload LoRA adapters, as in vLLM. Only an operator may use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from common.errors import InvalidArgument, PermissionDenied
from gateway.api.bodies import BodyReader
from gateway.api.openai_request import Body
from gateway.fleet.adapters import Adapters


class LoadAdapterBody(Body, kw_only=True):
    """The body of POST /v1/load_lora_adapter."""

    ignored = frozenset(("base_model_name",))
    unsupported: ClassVar[Mapping[str, Any]] = {"load_inplace": False, "is_3d_lora_weight": False}

    lora_name: str
    lora_path: str


class UnloadAdapterBody(Body, kw_only=True):
    """The body of POST /v1/unload_lora_adapter."""

    ignored = frozenset(("lora_int_id",))

    lora_name: str


class AdapterChanges:
    """The HTTP endpoints that load and unload adapters while requests run."""

    def __init__(self, adapters: Adapters, bodies: BodyReader, is_operator: Callable[[Request], bool]) -> None:
        """`is_operator` returns whether a request comes from an operator. It raises Unauthenticated for a missing or
        wrong key.
        """
        self._adapters = adapters
        self._bodies = bodies
        self._is_operator = is_operator
        self._tasks: set[asyncio.Task[None]] = set()

    async def load(self, request: Request) -> Response:
        self._check(request)
        body = await self._bodies.read(request, LoadAdapterBody)
        for name in ("lora_name", "lora_path"):
            if not getattr(body, name):
                raise InvalidArgument.of(name, "must not be empty")
        await self._to_the_end(self._adapters.load(body.lora_name, body.lora_path))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        self._check(request)
        body = await self._bodies.read(request, UnloadAdapterBody)
        await self._to_the_end(self._adapters.unload(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check(self, request: Request) -> None:
        if not self._is_operator(request):
            raise PermissionDenied("only an operator may load and unload adapters (operator=1 in the key file)")

    async def _to_the_end(self, change: Coroutine[Any, Any, None]) -> None:
        """Completes a change even if the client disconnects."""
        task = asyncio.create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)
