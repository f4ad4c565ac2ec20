"""`--max-itl`: prefill steps that take turns with decode steps are as short as the limit requires."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from looseleaf import LLM
from testing.collector import Collector
from testing.system import prompts, wait_for

PROMPTS = prompts(2, seed=3, lengths=(161, 161))
UNREACHABLE_MS = 1e-3
"""A limit that every step exceeds, so that steps have the least number of tokens, 16."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


async def answers(llm: LLM, collector: Collector) -> list[tuple[str, int]]:
    """Sends the prompts one after another. Returns the texts and the numbers of chunks."""
    found = []
    async with httpx.AsyncClient(timeout=60) as client:
        for prompt in PROMPTS:
            trace_id = os.urandom(16).hex()
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            headers = {"traceparent": f"00-{trace_id}-{os.urandom(8).hex()}-01"}
            reply = await client.post(f"http://{llm.addresses.http}/v1/completions", json=body, headers=headers)
            spans = await asyncio.to_thread(
                wait_for,
                lambda trace_id=trace_id: [s for s in collector.trace(trace_id) if s.name == "prefill.compute"],
                bool, 60.0, "no span of prefill",
            )  # fmt: skip
            found.append((str(reply.json()["choices"][0]["token_ids"]), spans[0].attributes["looseleaf.chunks"]))
    return found


@pytest.mark.parametrize("roles", ["both", "split"])
async def test_a_prompt_is_computed_in_shorter_steps_with_the_same_tokens(
    roles: str, checkpoint: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    settings = {"num_blocks": 256, "max_model_len": 512, "roles": roles, "max_num_batched_tokens": 128}
    found = {}
    for limit in (0.0, UNREACHABLE_MS):
        with LLM(str(checkpoint), max_itl=limit, **settings) as llm:
            found[limit] = await answers(llm, collector)
    free, limited = found[0.0], found[UNREACHABLE_MS]
    assert [tokens for tokens, _ in free] == [tokens for tokens, _ in limited]
    assert [chunks for _, chunks in free] == [2, 2]
    first, second = [chunks for _, chunks in limited]
    assert first == 1 + -(-(161 - 128) // 16)  # before the first step, its time is not known
    assert second == -(-161 // 16)
