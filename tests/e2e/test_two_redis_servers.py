"""Two hosts, each with a separate Redis server: the loss of one server affects only one arena."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.types import SamplingParams, StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from looseleaf import AsyncClient
from testing.oracle import Oracle
from testing.system import prompts
from testing.two_hosts import TwoHosts

STOPPING = StoppingParams(max_tokens=24)


@pytest.fixture(scope="module")
def hosts(checkpoint: Path) -> Iterator[TwoHosts]:
    with TwoHosts(checkpoint, namespaces=False, redis_per_host=True) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    settings = RunnerSettings(model=str(checkpoint), max_model_len=1024, num_threads=1, deterministic=True)
    return Oracle(ModelRunner(settings))


@pytest.mark.parametrize("lost", ["neither", "a", "b"])
async def test_blocks_travel_between_arenas_whose_ledgers_are_in_different_servers(
    hosts: TwoHosts, oracle: Oracle, lost: str
) -> None:
    wanted = prompts(8, seed=60 + ord(lost[0]), lengths=(40, 200))
    async with AsyncClient(hosts.grpc) as client:
        calls = [
            asyncio.create_task(client.generate(p, max_tokens=24, ignore_eos=True, timeout=60, temperature=0.0))
            for p in wanted
        ]
        await asyncio.sleep(0.1)
        if lost != "neither":
            (hosts.redis if lost == "a" else hosts.redis_of_b).flush()
        answers = await asyncio.gather(*calls)
    expected = [tuple(oracle.generate(p, SamplingParams(temperature=0.0), STOPPING)) for p in wanted]
    assert [answer.token_ids for answer in answers] == expected
    if lost == "neither":
        assert all(answer.usage.transferred_tokens > 0 for answer in answers)
    hosts.assert_nothing_held()
