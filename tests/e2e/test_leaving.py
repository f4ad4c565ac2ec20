"""A real deployment seen from outside: an orderly shutdown, and a request's id in the logs of all services."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from looseleaf import LLM, AsyncClient, Client
from testing.system import wait_for

DELAY_S = 600.0


async def test_a_gateway_that_ends_is_unhealthy_while_it_still_serves(checkpoint: Path) -> None:
    settings = {"num_blocks": 1024, "max_model_len": 2048, "drain_delay": DELAY_S}
    with LLM(str(checkpoint), **settings) as llm:  # type: ignore[arg-type]
        http = httpx.AsyncClient(base_url=f"http://{llm.addresses.http}", timeout=120)
        whole = health_pb2.HealthCheckRequest()
        async with AsyncClient(llm.addresses.grpc) as client, grpc.aio.insecure_channel(llm.addresses.grpc) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            running = asyncio.create_task(client.generate([11, 12, 13], max_tokens=400, ignore_eos=True))
            await asyncio.sleep(0.2)
            os.kill(llm.pids["gateway"], signal.SIGTERM)
            while (await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.02)
            assert (await http.get("/ping")).status_code == 503
            assert (await health.Check(whole)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            async with httpx.AsyncClient(base_url=http.base_url, timeout=120) as late:  # a new connection
                reply = await late.post("/v1/completions", json={"prompt": [11, 12], "max_tokens": 3})
            assert reply.status_code == 200
            os.kill(llm.pids["gateway"], signal.SIGTERM)  # a second signal ends the delay
            assert len((await running).token_ids) == 400
        await http.aclose()


def test_a_request_id_is_in_the_logs_of_the_workers(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = {"num_blocks": 256, "max_model_len": 512, "roles": "split", "log_level": "DEBUG", "verbose": True}
    read: list[str] = []

    def lines_with(request_id: str) -> list[str]:
        read.extend(capfd.readouterr().err.splitlines())
        return [line for line in read if request_id in line]

    with LLM(str(checkpoint), **settings) as llm:  # type: ignore[arg-type]
        body = {"prompt": [11, 12, 13], "max_tokens": 3}
        url, headers = f"http://{llm.addresses.http}/v1/completions", {"x-request-id": "mine-1"}
        reply = httpx.post(url, json=body, headers=headers, timeout=60)
        assert reply.headers["x-request-id"] == "mine-1"
        with Client(llm.addresses.grpc) as client:
            client.generate([11, 12, 13], max_tokens=3, request_id="mine-2")
        for name in ("mine-1", "mine-2"):
            found = wait_for(lambda: lines_with(name), lambda lines: len(lines) >= 2, 60.0, "not logged")  # noqa: B023
            assert any("prefill" in line and "3 prompt tokens" in line for line in found), found
            assert any("decode" in line and "is group" in line for line in found), found
