"""A gateway over HTTP with chosen options, for tests of its surface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.api.http_app import HttpApi
from gateway.api.http_options import HttpOptions
from gateway.api.server import HttpServer, bind_http
from testing.gateway.parts import Script
from tests.gateway.conftest import MakeRig
from tests.gateway.test_http import Served


@pytest.fixture
async def serve(make_rig: MakeRig) -> AsyncIterator[Any]:
    running: list[Served] = []

    async def start(script: Script | None = None, http: HttpOptions | None = None, **options: Any) -> Served:
        rig = await make_rig(script, **options)
        sock = bind_http("127.0.0.1", 0)
        app = HttpApi(rig.front).app(
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
