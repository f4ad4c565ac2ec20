"""Tenants over HTTP and gRPC: refusals before the body is read, the order of sequences, the cost of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from common.api_keys import ApiKeys, TenantLimits
from common.errors import ResourceExhausted
from common.rpc import RpcServer, open_channel
from common.status import error_of
from gateway.admission.gate import RESERVED_RANK
from gateway.admission.tenants import Tenants
from gateway.api.credentials import Authenticator
from gateway.api.grpc_service import InferenceServicer, key_check
from gateway.api.http_app import HttpApi
from gateway.api.key_ring import KeyRing
from gateway.api.server import HttpServer, bind_http
from protos.v1 import inference_pb2_grpc
from testing.gateway.parts import Script
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import until

KEYS = ApiKeys({"a-key": "a", "b-key": "b"}, {"a": TenantLimits(best_priority=-5), "b": TenantLimits(6, 1000, 0)})


class Front:
    """A gateway with two tenants, over HTTP."""

    def __init__(self, rig: Rig, address: tuple[str, int]) -> None:
        self.rig = rig
        self.address = address
        self.client = httpx.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", timeout=60)

    async def post(self, tenant: str, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {tenant}-key"}
        return await self.client.post("/v1/completions", json={"prompt": "the mill", **body}, headers=headers)


@pytest.fixture
async def serve(make_rig: MakeRig) -> AsyncIterator[Any]:
    running: list[tuple[Front, HttpServer]] = []

    async def start(script: Script | None = None, **options: Any) -> Front:
        rig = await make_rig(script, keys=KEYS, **options)
        sock = bind_http("127.0.0.1", 0)
        server = HttpServer(HttpApi(rig.front).app(lambda: True, show_metrics=True, timeout_s=20.0), sock)
        await server.start()
        running.append((Front(rig, sock.getsockname()), server))
        return running[-1][0]

    yield start
    for front, server in running:
        await front.client.aclose()
        await server.stop(1.0)


def test_a_reload_counts_the_keys_and_their_tenants(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("a a-key\na another\nb b-key\n")
    caplog.set_level("INFO", "keys")
    for api_key, counted in ((None, "3 keys of 2 tenants"), ("secret", "4 keys of 3 tenants")):
        KeyRing(api_key, str(file), Authenticator({}), Tenants({}, 0.0)).reload()
        assert caplog.messages[-1].endswith(counted)


async def test_a_wait_that_is_too_long_is_refused_before_the_body_comes(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = await serve()
    monkeypatch.setattr(front.rig.gate, "wait_s", lambda tenant, priority, coming: 12.4)
    reader, writer = await asyncio.open_connection(*front.address)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a-key\r\ncontent-length: 999\r\n\r\n"
    )
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    assert head.startswith(b"HTTP/1.1 429") and b"\r\nretry-after: 13\r\n" in head
    writer.close()
    assert front.rig.metric('looseleaf_requests_refused_total{model_name="tiny",reason="queue_wait"}') == 1
    assert front.rig.admission.current == 0


async def test_a_newcomer_is_served_beside_a_flood_and_goes_first_at_the_workers(serve: Any) -> None:
    front = await serve(Script(step_s=0.05), max_queue=24)
    flood = [asyncio.create_task(front.post("a", max_tokens=400, priority=-5)) for _ in range(40)]
    await until(lambda: front.rig.admission.current == 24 and len(front.rig.script.submitted) >= 16)
    reply = await front.post("b", max_tokens=2)
    assert reply.status_code == 200 and sum(task.done() for task in flood) == 40 - 24
    assert {task.result().status_code for task in flood if task.done()} == {429}
    assert front.rig.script.prefilled[-1].priority == front.rig.script.submitted[-1].priority == RESERVED_RANK
    assert {message.priority for message in front.rig.script.submitted[:-1]} == {-5}
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await until(lambda: front.rig.admission.current == 0 and front.rig.gate.inside == 0)


async def test_samples_and_prompts_count_each_until_the_answer_has_ended(serve: Any) -> None:
    front = await serve(Script(step_s=0.05), max_queue=8)
    for stream in (False, True):
        task = asyncio.create_task(front.post("a", prompt=["x", "y"], n=3, max_tokens=60, stream=stream))
        await until(lambda: front.rig.gate.inside == 6)
        assert front.rig.admission.current == 6 and front.rig.admission.num_requests == 1
        refused = await front.post("a", n=3)
        assert refused.status_code == 429 and "max_queue" in refused.json()["error"]["message"]
        assert (await front.post("a", n=2, max_tokens=1)).status_code == 200
        assert (await task).status_code == 200
        assert front.rig.admission.current == front.rig.admission.num_requests == 0


async def test_quotas_and_priorities_have_their_statuses_and_what_was_not_used_comes_back(serve: Any) -> None:
    front = await serve()
    refused = await front.post("b", priority=-1)
    assert refused.status_code == 403 and "priority -1" in refused.json()["error"]["message"]
    for _ in range(4):  # each request may take 300 tokens, and ends early
        assert (await front.post("b", max_tokens=300, stop=[front.rig.assets.tokenizer.decode([9])])).status_code == 200
    assert (await front.post("b", max_tokens=1)).status_code == 200
    reply = await front.post("b", max_tokens=1)
    assert reply.status_code == 429 and "6 requests per minute" in reply.json()["error"]["message"]
    assert 1 <= int(reply.headers["retry-after"]) <= 10
    assert (await front.post("a", max_tokens=1)).status_code == 200


async def test_over_grpc_too_it_is_refused_before_the_message_comes(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, codes = await make_rig(keys=KEYS), list[str]()
    monkeypatch.setattr(rig.gate, "wait_s", lambda tenant, priority, coming: 12.4)
    server = RpcServer("127.0.0.1", 0, check=key_check(rig.authenticator, rig.admission, codes.append))
    add = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    server.add(add, InferenceServicer(rig.front), "looseleaf.v1.InferenceService")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.stream_stream("/looseleaf.v1.InferenceService/Generate")(
                metadata=(("authorization", "Bearer a-key"),), timeout=60
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:  # no message has been sent
                await call.read()
        error = error_of(refused.value)
        assert isinstance(error, ResourceExhausted) and error.retry_after_s == pytest.approx(12.4)
        assert codes == ["RESOURCE_EXHAUSTED"] and rig.admission.current == 0
    finally:
        await server.stop(0.5)
