"""OpenAI's HTTP API for the same requests as gRPC: completions, chat and models; also vLLM's /tokenize, /health and
/metrics.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from common.errors import NotFound, Unimplemented
from gateway.admission.admission import Entry
from gateway.api.asgi import (
    EventSender,
    EventStream,
    error_response,
    guarded,
    while_connected,
    with_server_send,
)
from gateway.api.bodies import BodyBudget, BodyReader
from gateway.api.front import Front
from gateway.api.openai_reply import ChunkWriter, Envelope, dumps
from gateway.api.openai_request import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.api.openai_stream import Answer
from gateway.intake.validate import ResolvedRequest
from gateway.request.delta import Delta
from gateway.request.detokenize import TokenTexts
from gateway.request.outlet import Outlet

STALLED_CLIENT_S = 5.0
BODY_BUDGET_BYTES = 32 << 20


class HttpApi:
    """The HTTP endpoints. `ready` says whether requests can be served."""

    def __init__(self, front: Front) -> None:
        self._assets = front.assets
        self._authenticator = front.authenticator
        self._admission = front.admission
        self._validator = front.validator
        self._runner = front.runner
        self._metrics = front.metrics
        self._texts = TokenTexts(front.assets.tokenizer)
        self._ready: Callable[[], bool] = lambda: False
        self._timeout_s = STALLED_CLIENT_S

    def app(
        self,
        ready: Callable[[], bool],
        *,
        show_metrics: bool,
        timeout_s: float,
        body_budget_bytes: int = BODY_BUDGET_BYTES,
    ) -> ASGIApp:
        """Builds the application. `body_budget_bytes` limits all bodies that are received and not yet parsed."""
        self._bodies = BodyReader(self._validator.prompt_limits, BodyBudget(body_budget_bytes))
        self._ready = ready
        self._timeout_s = timeout_s + STALLED_CLIENT_S
        routes = [
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/chat/completions", self.chat, "POST"),
            self._route("/v1/models", self.models, "GET"),
            self._route("/v1/models/{model:path}", self.models, "GET"),
            self._route("/tokenize", self.tokenize, "POST"),
            self._route("/detokenize", self.detokenize, "POST"),
            self._route("/health", self.health, "GET"),
        ]
        if show_metrics:
            routes.append(self._route("/metrics", self.show_metrics, "GET"))
        return with_server_send(Starlette(routes=routes, exception_handlers={HTTPException: _http_error}))

    def _route(self, path: str, endpoint: Callable[[Request], Any], method: str) -> Route:
        return Route(path, guarded(endpoint, lambda error: self._metrics.failed(error.grpc_code)), methods=[method])

    def _tenant(self, request: Request) -> str:
        address = request.client.host if request.client is not None else ""
        return self._authenticator.tenant(request.headers.get("authorization"), address)

    async def completions(self, request: Request) -> Response:
        tenant = self._tenant(request)
        with ExitStack() as stack:
            entry = stack.enter_context(self._admission.enter(tenant))
            body = await self._bodies.read(request, CompletionBody)
            envelope = Envelope("cmpl-" + secrets.token_hex(12), "text_completion", self._assets.name)
            return await self._answer(request, Answer(self._assets, body, envelope, self._texts), entry, stack)

    async def chat(self, request: Request) -> Response:
        tenant = self._tenant(request)
        with ExitStack() as stack:
            entry = stack.enter_context(self._admission.enter(tenant))
            body = await self._bodies.read(request, ChatBody)
            envelope = Envelope("chatcmpl-" + secrets.token_hex(12), "chat.completion", self._assets.name)
            return await self._answer(request, Answer(self._assets, body, envelope, self._texts), entry, stack)

    async def _answer(self, request: Request, answer: Answer, entry: Entry, stack: ExitStack) -> Response:
        """Returns the answer. `stack` releases the request's admission at once, or for a streamed answer when the
        stream ends.
        """
        if answer.body.stream:
            return EventStream(partial(self._stream, answer, entry), self._count_error, stack.pop_all())
        content = await while_connected(request.receive, self._whole(answer, entry))
        return Response(content, media_type="application/json")

    def _count_error(self, error: Any) -> None:
        self._metrics.failed(error.grpc_code)

    async def _take(self, answer: Answer, entry: Entry) -> None:
        """Resolves the request. Raises an error if the request is invalid."""
        requests = []
        for wanted in answer.body.all_wanted():
            requests.append(await self._validator.resolve(wanted, entry.tenant))
            await asyncio.sleep(0)  # streams go on between one prompt of a batch and the next
        answer.take(requests)
        entry.take(requests)

    async def _whole(self, answer: Answer, entry: Entry) -> bytes:
        async with self._admission.answers.within(self._timeout_s):
            await self._take(answer, entry)
            outlets = [Outlet(partial(answer.add, number)) for number in range(len(answer.requests))]
            await self._run(answer.requests, outlets)
            return answer.whole()

    async def _stream(self, answer: Answer, entry: Entry, sender: EventSender) -> None:
        writer = ChunkWriter(answer.envelope, include_usage=answer.body.include_usage)
        async with AsyncExitStack() as opened, self._admission.answers.within(self._timeout_s):
            await self._take(answer, entry)
            send = sender.send if len(answer.requests) == 1 else _in_turn(sender.send)
            outlets = [Outlet(_Events(answer, number, writer, send).write) for number in range(len(answer.requests))]
            for outlet in outlets:
                await opened.enter_async_context(outlet)
            await self._run(answer.requests, outlets)

    async def _run(self, requests: list[ResolvedRequest], outlets: list[Outlet]) -> None:
        """Runs all requests at once. The first failure cancels the others and is raised unchanged, so that its status
        is kept.
        """
        runs = [self._runner.run(request, outlet) for request, outlet in zip(requests, outlets, strict=True)]
        if len(runs) == 1:
            return await runs[0]
        try:
            async with asyncio.TaskGroup() as group:
                for run in runs:
                    group.create_task(run)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def models(self, request: Request) -> Response:
        self._tenant(request)
        entry = {
            "id": self._assets.name,
            "object": "model",
            "created": 0,
            "owned_by": "looseleaf",
            "max_model_len": self._validator.checker().max_model_len,
        }
        if (name := request.path_params.get("model")) is not None:
            self._validator.check_model(name)
            return _json(entry)
        return _json({"object": "list", "data": [entry]})

    async def tokenize(self, request: Request) -> Response:
        self._tenant(request)
        body = await self._bodies.read(request, TokenizeBody)
        self._validator.check_model(body.model)
        name, prompt = body.input()
        ids = await self._validator.tokenize(prompt, name, add_special_tokens=body.add_special_tokens)
        return _json({"count": len(ids), "max_model_len": self._validator.checker().max_model_len, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        self._tenant(request)
        body = await self._bodies.read(request, DetokenizeBody)
        self._validator.check_model(body.model)
        return _json({"prompt": await self._validator.detokenize(body.tokens, "tokens")})

    async def health(self, request: Request) -> Response:
        ready = self._ready()
        return _json({"status": "ready" if ready else "waiting for workers"}, 200 if ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Events:
    """A writer of one request's deltas as chunks of the HTTP answer."""

    __slots__ = ("_answer", "_number", "_send", "_writer")

    def __init__(self, answer: Answer, number: int, writer: ChunkWriter, send: Callable[[bytes], Any]) -> None:
        self._answer = answer
        self._number = number
        self._writer = writer
        self._send = send

    def write(self, deltas: list[Delta]) -> Any:
        events = self._answer.chunks(self._writer, self._number, deltas)
        return self._send(events) if events else None


def _in_turn(send: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Makes several outlets of one client send one at a time."""
    turn = asyncio.Lock()

    async def send_in_turn(events: bytes) -> None:
        async with turn:
            await send(events)

    return send_in_turn


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = error_response(Unimplemented(f"there is no {asked} here, only {allowed}"))
        response.headers["allow"] = allowed
    else:
        response = error_response(NotFound(f"there is no {asked} here"))
    response.status_code = error.status_code
    return response


def _json(content: Any, status: int = 200) -> Response:
    return Response(dumps(content), status, media_type="application/json")
