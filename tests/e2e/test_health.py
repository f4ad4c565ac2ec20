"""Every service answers health checks while prompts are computed."""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from looseleaf import LLM, AsyncClient
from testing.system import prompts

ROUNDS, PROMPTS, PROMPT_LEN = 3, 8, 4000
STEPS = PROMPT_LEN / 512
"""Steps of a prompt. A check that waits for a step to end is answered as often."""


async def test_health_answers_while_long_prompts_are_prefilled(llm: LLM) -> None:
    """No check waits for a step of a prompt, so every service answers more checks than there are steps. `python -m
    loadtest.latency` measures the latency.
    """
    answered = dict.fromkeys(llm.addresses.services, 0)
    busy = True

    async def probe(name: str, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while busy:
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
                answered[name] += busy
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
                await asyncio.sleep(0.002)

    probes = [asyncio.create_task(probe(*item)) for item in llm.addresses.services.items()]
    async with AsyncClient(llm.addresses.grpc) as client:
        for number in range(ROUNDS):
            long = prompts(PROMPTS, seed=15 + number, lengths=(PROMPT_LEN, PROMPT_LEN))
            await asyncio.gather(*(client.generate(p, max_tokens=2, temperature=0.0) for p in long))
    busy = False
    await asyncio.gather(*probes)
    assert len(answered) == 4 and min(answered.values()) > 1.15 * STEPS * ROUNDS * PROMPTS, answered
