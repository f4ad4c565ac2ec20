"""Every service answers health checks while prompts are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from looseleaf import LLM, AsyncClient
from testing.system import prompts

ROUNDS, PROMPTS, PROMPT_LEN = 3, 4, 8000


@pytest.fixture(scope="module")
def long_steps(checkpoint: Path) -> Iterator[LLM]:
    """A system with one prefill and one decode worker. A step of the prefill worker computes a whole prompt."""
    with LLM(
        str(checkpoint), num_blocks=4096, max_model_len=8192, roles="split", max_num_batched_tokens=PROMPT_LEN
    ) as running:
        yield running


async def test_health_answers_while_long_prompts_are_prefilled(long_steps: LLM) -> None:
    """No check waits for a step. A worker whose checks wait answers about 50 (48 with steps in its event loop), and one
    with separate steps several hundred. `python -m loadtest.latency` measures the latency.
    """
    llm = long_steps
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
    assert len(answered) == 4 and min(answered.values()) > 10 * ROUNDS * PROMPTS, answered
