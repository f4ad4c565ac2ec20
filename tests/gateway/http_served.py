"""A gateway over HTTP with given options, for tests of the API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from gateway.api.http_app import HttpApi
from gateway.api.http_fleet import FleetView
from gateway.api.http_options import HttpOptions
from gateway.api.server import HttpServer, bind_http
from testing.gateway.parts import Script, expected_ids
from tests.gateway.conftest import MakeRig, Rig


class Served:
    """A running gateway, with an HTTP client for it."""

    def __init__(self, rig: Rig, server: HttpServer, url: str) -> None:
        self.rig, self.server, self.url = rig, server, url
        self.client = httpx.AsyncClient(base_url=url, timeout=60)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Returns the decoded chunks of a stream. Its last line must be [DONE]."""
        lines = (await self.post(path, stream=True, **body)).text.strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def text_of(self, prompt: str, count: int) -> str:
        tokenizer = self.rig.assets.tokenizer
        return str(tokenizer.decode(expected_ids(tokenizer.encode(prompt).ids, count)))


@pytest.fixture
async def serve(make_rig: MakeRig) -> AsyncIterator[Any]:
    running: list[Served] = []

    async def start(
        script: Script | None = None,
        http: HttpOptions | None = None,
        view: Callable[[Rig], FleetView] | None = None,
        **options: Any,
    ) -> Served:
        rig = await make_rig(script, **options)
        sock = bind_http("127.0.0.1", 0)
        app = HttpApi(rig.front, None if view is None else view(rig)).app(
            lambda: rig.workers.ready, show_metrics=True, timeout_s=20.0, options=http or HttpOptions()
        )
        server = HttpServer(app, sock)
        await server.start()
        running.append(Served(rig, server, f"http://127.0.0.1:{sock.getsockname()[1]}"))
        return running[-1]

    yield start
    for served in running:
        await served.client.aclose()
        await served.server.stop(1.0)
