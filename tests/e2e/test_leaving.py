"""SIGTERM to a real gateway: load balancers see it in time, and nobody notices anything else."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from looseleaf import LLM, AsyncClient

DELAY_S = 2.0


async def test_a_gateway_that_ends_is_unhealthy_while_it_still_serves(checkpoint: Path) -> None:
    settings = {"num_blocks": 1024, "max_model_len": 2048, "drain_delay": DELAY_S}
    with LLM(str(checkpoint), **settings) as llm:  # type: ignore[arg-type]
        http = httpx.AsyncClient(base_url=f"http://{llm.addresses.http}", timeout=30)
        whole = health_pb2.HealthCheckRequest()
        async with AsyncClient(llm.addresses.grpc) as client, grpc.aio.insecure_channel(llm.addresses.grpc) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            running = asyncio.create_task(client.generate([11, 12, 13], max_tokens=400, ignore_eos=True))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            os.kill(llm.pids["gateway"], signal.SIGTERM)
            while (await http.get("/health")).status_code == 200:
                assert time.monotonic() - began < DELAY_S
                await asyncio.sleep(0.02)
            assert (await http.get("/ping")).status_code == 503
            assert (await health.Check(whole)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            async with httpx.AsyncClient(base_url=http.base_url, timeout=30) as late:  # a connection of its own
                reply = await late.post("/v1/completions", json={"prompt": [11, 12], "max_tokens": 3})
            assert reply.status_code == 200 and time.monotonic() - began < DELAY_S
            assert len((await running).token_ids) == 400
        await http.aclose()
