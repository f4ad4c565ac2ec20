"""Serves the HTTP endpoints about the model: the list of the model and its adapters, and the tokenizer. These endpoints
send nothing to the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidArgument
from gateway.api.answer import renamed
from gateway.api.asgi import while_connected
from gateway.api.bodies import BodyReader
from gateway.api.front import Front
from gateway.api.http_about import json_response
from gateway.api.messages_reply import MessagesAnswer
from gateway.api.messages_request import CountTokensBody
from gateway.api.openai_request import DetokenizeBody, TokenizeBody
from gateway.intake.wanted import Wanted


class ModelApi:
    """The HTTP endpoints about the model."""

    def __init__(self, front: Front, check_key: Callable[[Request], object], bodies: BodyReader) -> None:
        self._name = front.assets.name
        self._adapters = front.adapters
        self._validator = front.validator
        self._planner = front.planner
        self._check_key = check_key
        self._bodies = bodies
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        about = {
            "object": "model",
            "created": self._created,
            "owned_by": "looseleaf",
            "max_model_len": self._validator.checker().max_model_len,
            "pooling": self._validator.pooling,
        }
        adapters = [{"id": ref.name, **about, "parent": self._name} for ref in self._adapters.served]
        entries = [{"id": self._name, **about}, *adapters]
        if (name := request.path_params.get("model")) is not None:
            self._validator.check_model(name or "\n")  # a path that ends in a newline arrives as an empty name
            return json_response(next(entry for entry in entries if entry["id"] == name))
        return json_response({"object": "list", "data": entries})

    async def tokenize(self, request: Request) -> Response:
        self._check_key(request)
        body = await self._bodies.read(request, TokenizeBody)
        self._validator.check_model(body.model)
        name, prompt = body.input()
        self._planner.check(prompt)
        work = self._validator.tokenize(prompt, name, add_special_tokens=body.add_special_tokens)
        ids = await while_connected(request.receive, work)
        return json_response(
            {"count": len(ids), "max_model_len": self._validator.checker().max_model_len, "tokens": ids}
        )

    async def count_tokens(self, request: Request) -> Response:
        self._check_key(request)
        body = await self._bodies.read(request, CountTokensBody)
        self._validator.check_model(body.model)
        wanted = Wanted(prompt=body.prompt())
        body.structured()  # refuses a format that an answer could not have
        self._planner.plan(wanted, body.chosen_tools())  # leaves out tools that may not be called
        work = self._validator.tokenize(wanted.prompt, "messages", add_special_tokens=None)
        try:
            ids = await while_connected(request.receive, work)
        except InvalidArgument as error:
            raise renamed(error, MessagesAnswer.field_names) from None
        return json_response({"input_tokens": len(ids)})

    async def detokenize(self, request: Request) -> Response:
        self._check_key(request)
        body = await self._bodies.read(request, DetokenizeBody)
        self._validator.check_model(body.model)
        work = self._validator.detokenize(body.tokens, "tokens")
        return json_response({"prompt": await while_connected(request.receive, work)})
