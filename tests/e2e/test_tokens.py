"""Promise 1 through real services: the same tokens alone, together, with and without cached prefix, on any worker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from common.types import SamplingParams, StoppingParams
from engine.model_runner import ModelRunner, RunnerSettings
from looseleaf import LLM, AsyncClient
from testing.oracle import Oracle
from testing.system import assert_nothing_held, prompts

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SEEDED: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 7, "max_tokens": 24, "ignore_eos": True,
    "repetition_penalty": 1.1, "presence_penalty": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[tuple[int, ...]]]:
    """The outputs of one process with a batch of one and no cache."""
    settings = RunnerSettings(model=str(checkpoint), max_model_len=8192, num_threads=1, deterministic=True)
    oracle = Oracle(ModelRunner(settings))
    greedy = SamplingParams(temperature=0.0)
    seeded = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, repetition_penalty=1.1, presence_penalty=0.2)
    stopping = StoppingParams(max_tokens=24)
    return {
        name: [tuple(oracle.generate(prompt, params, stopping)) for prompt in PROMPTS]
        for name, params in (("greedy", greedy), ("seeded", seeded))
    }


PROMPTS = [
    *prompts(12, seed=3, lengths=(1, 60)),
    *prompts(1, seed=4, lengths=(15, 15)),
    *prompts(1, seed=5, lengths=(16, 16)),
    *prompts(1, seed=6, lengths=(17, 17)),
    *prompts(1, seed=7, lengths=(700, 700)),
]


async def together(llm: LLM, options: dict[str, Any]) -> list[tuple[int, ...]]:
    async with AsyncClient(llm.addresses.grpc) as client:
        done = await asyncio.gather(*(client.generate(prompt, **options) for prompt in PROMPTS))
    return [item.token_ids for item in done]


@pytest.mark.parametrize("name,options", [("greedy", GREEDY), ("seeded", SEEDED)])
async def test_alone_together_cold_and_cached_give_the_oracles_tokens(
    llm: LLM, expected: dict[str, list[tuple[int, ...]]], name: str, options: dict[str, Any]
) -> None:
    salt = {"cache_salt": name}
    assert await together(llm, options | salt) == expected[name], "16 at once, cold"
    assert await together(llm, options | salt) == expected[name], "16 at once, cached"
    alone = [llm.client.generate(prompt, **options, cache_salt=f"alone-{name}") for prompt in PROMPTS]
    assert [item.token_ids for item in alone] == expected[name], "alone, cold"
    again = [llm.client.generate(prompt, **options, cache_salt=f"alone-{name}") for prompt in PROMPTS]
    assert [item.token_ids for item in again] == expected[name], "alone, cached"


async def test_two_by_two_workers_give_the_oracles_tokens(
    two_by_two: LLM, expected: dict[str, list[tuple[int, ...]]]
) -> None:
    assert await together(two_by_two, GREEDY) == expected["greedy"]
    assert await together(two_by_two, SEEDED) == expected["seeded"]


async def test_both_roles_in_one_process_give_the_oracles_tokens(
    checkpoint: Path, expected: dict[str, list[tuple[int, ...]]]
) -> None:
    with LLM(str(checkpoint), num_blocks=4096, max_model_len=8192, roles="both") as llm:
        assert set(llm.pids) == {"block_store", "worker", "gateway"}
        assert await together(llm, GREEDY) == expected["greedy"], "cold"
        assert await together(llm, SEEDED) == expected["seeded"], "cached"
        assert {name.rpartition(".")[2] for name in llm.requests_by_worker()} == {"prefill", "decode"}
        assert_nothing_held(llm.addresses.block_store)


@pytest.mark.parametrize("roles", ["both", "adaptive"])
async def test_two_processes_with_both_roles_give_the_oracles_tokens(
    checkpoint: Path, expected: dict[str, list[tuple[int, ...]]], roles: str
) -> None:
    """With --roles both, a request stays in one process. With --roles adaptive, both processes are considered."""
    with LLM(str(checkpoint), num_blocks=4096, max_model_len=2048, roles=roles, prefill=2, decode=2) as llm:
        assert set(llm.pids) == {"block_store", "worker-0", "worker-1", "gateway"}
        assert await together(llm, GREEDY) == expected["greedy"], "cold"
        assert await together(llm, SEEDED) == expected["seeded"], "cached"
        assert set(llm.requests_by_worker()) == {f"worker-{n}.{role}" for n in (0, 1) for role in ("prefill", "decode")}
        done = llm.client.generate(PROMPTS[0], **GREEDY)
        [attempt] = llm.client.explain(done.request_id)[0].attempts
        names = {one.worker_id.partition(".")[0] for one in attempt.decode_considered}
        process = attempt.prefill_worker.partition(".")[0]
        assert names == ({process} if roles == "both" else {"worker-0", "worker-1"})
        assert len(attempt.prefill_considered) == 2
        assert_nothing_held(llm.addresses.block_store)


def test_logprobs_belong_to_the_tokens(llm: LLM) -> None:
    done = llm.client.generate(PROMPTS[0], **GREEDY, logprobs=3, prompt_logprobs=2)
    assert [item.token_id for item in done.logprobs] == list(done.token_ids)
    assert all(item.rank == 1 and item.top[0] == (item.token_id, item.logprob) for item in done.logprobs)
    assert [item.token_id for item in done.prompt_logprobs] == PROMPTS[0][1:]
