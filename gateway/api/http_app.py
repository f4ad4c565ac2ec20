"""Builds the HTTP application with all its endpoints, and answers the requests that run on workers: completions, chats,
responses, messages, embeddings and scores.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from common.errors import InvalidArgument
from gateway.admission.admission import Entry
from gateway.api.answer import HttpAnswer, WholeAnswer, renamed
from gateway.api.asgi import (
    ContentOf,
    EventSender,
    EventStream,
    guarded,
    in_turn,
    joined,
    while_connected,
    with_server_send,
)
from gateway.api.bodies import BodyBudget, BodyReader
from gateway.api.embedding_reply import EmbeddingAnswer, ScoreAnswer
from gateway.api.embedding_request import EmbeddingBody, ScoreBody
from gateway.api.front import Front
from gateway.api.http_about import About, served_by
from gateway.api.http_adapters import AdapterChanges
from gateway.api.http_explain import ExplainApi
from gateway.api.http_fleet import FleetApi, FleetView
from gateway.api.http_frame import framed, warn
from gateway.api.http_model import ModelApi
from gateway.api.http_options import DEFAULT_OPTIONS, HttpOptions
from gateway.api.http_page import Page
from gateway.api.messages_reply import MessagesAnswer, messages_error
from gateway.api.messages_request import MessagesBody
from gateway.api.openai_reply import Envelope, error_body
from gateway.api.openai_request import Body, ChatBody, CompletionBody
from gateway.api.openai_stream import Answer
from gateway.api.responses_reply import ResponsesAnswer
from gateway.api.responses_request import ResponsesBody
from gateway.api.unrouted import unrouted
from gateway.api.whole_response import WholeResponse
from gateway.intake.resolved_request import ResolvedRequest
from gateway.request.delta import Delta
from gateway.request.detokenize import TokenTexts
from gateway.request.outlet import Outlet

B = TypeVar("B", bound=Body)
STALLED_CLIENT_S = 5.0
BODY_BUDGET_BYTES = 32 << 20


class HttpApi:
    """The HTTP endpoints of one gateway."""

    def __init__(self, front: Front, fleet: FleetView | None = None) -> None:
        """Without `fleet`, there are no endpoints about workers and blocks."""
        self._front = front
        self._fleet = fleet
        self._assets = front.assets
        self._authenticator = front.authenticator
        self._admission = front.admission
        self._validator = front.validator
        self._runner = front.runner
        self._metrics = front.metrics
        self._planner = front.planner
        self._texts = TokenTexts(front.assets.tokenizer)
        self._timeout_s = STALLED_CLIENT_S

    def app(
        self,
        ready: Callable[[], bool],
        *,
        show_metrics: bool,
        timeout_s: float,
        body_budget_bytes: int = BODY_BUDGET_BYTES,
        options: HttpOptions = DEFAULT_OPTIONS,
        is_operator: Callable[[str], bool] | None = None,
    ) -> ASGIApp:
        """Builds the application. `ready` returns whether requests can be served. `body_budget_bytes` limits the total
        size of all bodies that are being received or parsed. `is_operator` returns whether a tenant may load adapters;
        if it is None, the application has no endpoints for adapters.
        """
        budget = BodyBudget(body_budget_bytes)
        self._bodies = BodyReader(self._validator.prompt_limits, budget, strict=options.strict_fields)
        self._timeout_s = timeout_s + STALLED_CLIENT_S
        model = ModelApi(self._front, self._tenant, self._bodies)
        explain = ExplainApi(self._runner.explanations, self._tenant)
        routes = [
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/chat/completions", self.chat, "POST"),
            self._route("/v1/responses", self.responses, "POST"),
            self._route("/v1/messages", self.messages, "POST", errors=messages_error),
            self._route("/v1/messages/count_tokens", model.count_tokens, "POST", errors=messages_error),
            self._route("/v1/embeddings", self.embeddings, "POST"),
            *(self._route(path, self.score, "POST") for path in ("/score", "/v1/score")),
            self._route("/v1/models", model.models, "GET"),
            self._route("/v1/models/{model:path}", model.models, "GET"),
            *(self._route(path, explain.recent, "GET") for path in ("/v1/explain", "/v1/explain/{request_id:path}")),
            self._route("/tokenize", model.tokenize, "POST"),
            self._route("/detokenize", model.detokenize, "POST"),
            *([] if is_operator is None else self._adapter_routes(is_operator)),
            *([] if self._fleet is None else self._fleet_routes(self._fleet)),
            *self._about_routes(ready, show_metrics, options),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: unrouted})
        return with_server_send(framed(app, options.origins))

    def _adapter_routes(self, is_operator: Callable[[str], bool]) -> list[Route]:
        may = lambda request: is_operator(self._tenant(request))  # noqa: E731
        changes = AdapterChanges(self._front.adapters, self._bodies, may)
        return [
            self._route("/v1/load_lora_adapter", changes.load, "POST"),
            self._route("/v1/unload_lora_adapter", changes.unload, "POST"),
        ]

    def _fleet_routes(self, view: FleetView) -> list[Route]:
        fleet = FleetApi(view, self._tenant, self._count_error)
        return [
            self._route("/v1/workers", fleet.workers, "GET"),
            self._route("/v1/blocks", fleet.watch, "GET"),
            self._route("/v1/blocks/{block}", fleet.block, "GET"),
        ]

    def _about_routes(self, ready: Callable[[], bool], show_metrics: bool, options: HttpOptions) -> list[Route]:
        about = About(ready, lambda: self._admission.num_requests, partial(served_by, self._front))
        routes = [
            self._route("/health", about.health, "GET"),
            self._route("/ping", about.ping, "GET", "POST"),
            self._route("/version", about.version, "GET"),
        ]
        if show_metrics:
            routes += [self._route("/metrics", self.show_metrics, "GET"), self._route("/load", about.load, "GET")]
        if options.page:
            page = Page()
            routes += [self._route(path, page.file, "GET") for path in ("/", "/ui/{name}")]
        if options.describe:
            routes += [self._route(path, about.docs, "GET") for path in ("/docs", "/docs.js", "/docs.css")]
            routes.append(self._route("/openapi.json", about.openapi, "GET"))
        return routes

    def _route(
        self, path: str, endpoint: Callable[[Request], Any], *methods: str, errors: ContentOf = error_body
    ) -> Route:
        return Route(path, guarded(endpoint, self._count_error, errors), methods=methods)

    def _tenant(self, request: Request) -> str:
        address = request.client.host if request.client is not None else ""
        authorization = request.headers.get("authorization")
        if authorization is None and (key := request.headers.get("x-api-key")):  # as Anthropic's clients do
            authorization = f"Bearer {key}"
        return self._authenticator.tenant(authorization, address)

    async def completions(self, request: Request) -> Response:
        def begin(body: CompletionBody) -> HttpAnswer:
            envelope = Envelope("cmpl-" + secrets.token_hex(12), "text_completion", self._name(body))
            return Answer(self._assets, body, envelope, self._texts)

        return await self._ask(request, CompletionBody, begin)

    async def chat(self, request: Request) -> Response:
        def begin(body: ChatBody) -> HttpAnswer:
            envelope = Envelope("chatcmpl-" + secrets.token_hex(12), "chat.completion", self._name(body))
            return Answer(self._assets, body, envelope, self._texts, self._planner)

        return await self._ask(request, ChatBody, begin)

    async def responses(self, request: Request) -> Response:
        def begin(body: ResponsesBody) -> HttpAnswer:
            if body.store:
                warn(request.scope, "store has no effect: nothing is stored")
            return ResponsesAnswer(body, self._name(body), self._planner)

        return await self._ask(request, ResponsesBody, begin)

    async def messages(self, request: Request) -> Response:
        def begin(body: MessagesBody) -> HttpAnswer:
            return MessagesAnswer(body, self._name(body), self._planner)

        return await self._ask(request, MessagesBody, begin)

    async def embeddings(self, request: Request) -> Response:
        return await self._pool(request, EmbeddingBody, lambda body: EmbeddingAnswer(body, self._name(body)))

    async def score(self, request: Request) -> Response:
        return await self._pool(request, ScoreBody, lambda body: ScoreAnswer(body, self._name(body)))

    async def _pool(self, request: Request, kind: type[B], begin: Callable[[B], WholeAnswer]) -> Response:
        """Admits the request, reads its body, and answers it without streaming."""
        tenant = self._tenant(request)
        with ExitStack() as stack:
            entry = stack.enter_context(self._admission.enter(tenant))
            answer = begin(await self._bodies.read(request, kind))
            return await self._complete(request, answer, entry, stack)

    def _name(self, body: Body) -> str:
        """Returns the name of the model or adapter that answers. The validator refuses unknown names."""
        return body.model or self._assets.name

    async def _ask(self, request: Request, kind: type[B], begin: Callable[[B], HttpAnswer]) -> Response:
        """Admits the request, reads its body, and returns the answer that `begin` creates for the body."""
        tenant = self._tenant(request)
        with ExitStack() as stack:
            entry = stack.enter_context(self._admission.enter(tenant))
            answer = begin(await self._bodies.read(request, kind))
            return await self._answer(request, answer, entry, stack)

    async def _answer(self, request: Request, answer: HttpAnswer, entry: Entry, stack: ExitStack) -> Response:
        """Returns the answer, which takes over the contents of `stack` and ends the admission when it has been sent. If
        there is an error, the caller closes `stack`.
        """
        if answer.asking.stream:
            return EventStream(partial(self._stream, answer, entry), answer, self._count_error, stack.pop_all())
        return await self._complete(request, answer, entry, stack)

    async def _complete(self, request: Request, answer: WholeAnswer, entry: Entry, stack: ExitStack) -> Response:
        """Returns a complete answer. Takes over the contents of `stack` like `_answer`."""
        content = await while_connected(request.receive, self._whole(answer, entry))
        in_time = partial(self._admission.answers.within, self._timeout_s)
        return WholeResponse(content, in_time, self._count_error, stack.pop_all())

    def _count_error(self, error: Any) -> None:
        self._metrics.failed(error.grpc_code)

    async def _take(self, answer: WholeAnswer, entry: Entry) -> None:
        """Resolves and admits the body's requests. Raises the errors of `Validator.resolve` and `Entry.take`, with the
        body's names for the fields.
        """
        requests = []
        for wanted in answer.all_wanted():
            try:
                requests.append(await self._validator.resolve(wanted, entry.tenant))
            except InvalidArgument as error:
                raise renamed(error, answer.field_names) from None
            await asyncio.sleep(0)  # lets streams continue between two prompts of a batch
        answer.take(requests)
        try:
            entry.take(requests)
        except InvalidArgument as error:
            raise renamed(error, answer.field_names) from None

    async def _whole(self, answer: WholeAnswer, entry: Entry) -> bytes:
        async with self._admission.answers.within(self._timeout_s):
            await self._take(answer, entry)
            outlets = [Outlet(partial(answer.add, number)) for number in range(len(answer.requests))]
            await self._run(answer.requests, outlets)
            return await joined(answer.whole())

    async def _stream(self, answer: HttpAnswer, entry: Entry, sender: EventSender) -> None:
        async with AsyncExitStack() as opened, self._admission.answers.within(self._timeout_s):
            await self._take(answer, entry)
            send = sender.send if len(answer.requests) == 1 else in_turn(sender.send)
            outlets = [Outlet(_Events(answer, number, send).write) for number in range(len(answer.requests))]
            for outlet in outlets:
                await opened.enter_async_context(outlet)
            await self._run(answer.requests, outlets)

    async def _run(self, requests: list[ResolvedRequest], outlets: list[Outlet]) -> None:
        """Runs all requests at the same time. The first failure cancels the other requests and is raised unchanged, so
        that its status is kept.
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

    async def show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Events:
    """A writer that sends one request's deltas as events of the HTTP answer."""

    __slots__ = ("_answer", "_number", "_send")

    def __init__(self, answer: HttpAnswer, number: int, send: Callable[[bytes], Any]) -> None:
        self._answer = answer
        self._number = number
        self._send = send

    def write(self, deltas: list[Delta]) -> Any:
        events = self._answer.events(self._number, deltas)
        return self._send(events) if events else None
