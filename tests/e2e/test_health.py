"""Every service answers health checks while prompts are computed."""

from __future__ import annotations

import asyncio
import time

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from looseleaf import LLM, AsyncClient
from testing.system import prompts


async def test_health_answers_while_long_prompts_are_prefilled(llm: LLM) -> None:
    """The bound shows that no check waits for a prompt. `python -m loadtest.latency` measures the latency."""
    waits: dict[str, list[float]] = {name: [] for name in llm.addresses.services}
    busy = True

    async def probe(name: str, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while busy or len(waits[name]) < 100:
                started = time.monotonic()
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                waits[name].append(time.monotonic() - started)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
                await asyncio.sleep(0.01)

    probes = [asyncio.create_task(probe(*item)) for item in llm.addresses.services.items()]
    async with AsyncClient(llm.addresses.grpc) as client:
        long = prompts(8, seed=15, lengths=(4000, 4000))
        await asyncio.gather(*(client.generate(p, max_tokens=2, temperature=0.0) for p in long))
    busy = False
    await asyncio.gather(*probes)
    assert len(waits) == 4
    assert all(len(values) >= 100 and max(values) <= 1.0 for values in waits.values()), waits
