"""`--max-itl`: prefill steps are as short as the limit requires while something decodes on the same cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from looseleaf import LLM, metrics_page
from looseleaf.client import AsyncClient
from looseleaf.results import Delta
from testing.collector import Collector
from testing.system import prompts, wait_for

PROMPTS = prompts(2, seed=3, lengths=(161, 161))
NUM_STREAMS = 32
"""So many sequences of 8,000 tokens take the worker more than ten seconds. Four of 4,000 took about two, and a busy
machine could pause this process for longer.
"""
UNREACHABLE_MS = 1e-3
"""A limit that every step exceeds, so that steps have the least number of tokens, 16."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


async def send(llm: LLM) -> list[tuple[str, str]]:
    """Sends the prompts one after another. Returns the token ids and the trace ids."""
    found = []
    async with httpx.AsyncClient(timeout=60) as client:
        for prompt in PROMPTS:
            trace_id = os.urandom(16).hex()
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            headers = {"traceparent": f"00-{trace_id}-{os.urandom(8).hex()}-01"}
            reply = await client.post(f"http://{llm.addresses.http}/v1/completions", json=body, headers=headers)
            found.append((str(reply.json()["choices"][0]["token_ids"]), trace_id))
    return found


def num_chunks(collector: Collector, trace_id: str) -> int:
    spans = wait_for(
        lambda: [s for s in collector.trace(trace_id) if s.name == "prefill.compute"], bool, 60.0, "no span of prefill"
    )
    return int(spans[0].attributes["looseleaf.chunks"])


def num_running(llm: LLM) -> float:
    """Returns the number of sequences that decode, even if this process has not read all of their tokens."""
    samples = metrics_page.read(llm.addresses.http)
    return metrics_page.total(samples, "looseleaf_worker_running", role="decode")


@contextlib.asynccontextmanager
async def decoding(llm: LLM) -> AsyncIterator[None]:
    """Keeps NUM_STREAMS sequences decoding."""

    async def read(stream: AsyncIterator[Delta]) -> None:
        async for _ in stream:
            pass

    async with AsyncClient(llm.addresses.grpc) as client:
        streams = [client.stream(PROMPTS[0][: 8 + n], max_tokens=8000, ignore_eos=True) for n in range(NUM_STREAMS)]
        for stream in streams:
            await anext(stream)
        readers = [asyncio.create_task(read(stream)) for stream in streams]
        yield
        await asyncio.to_thread(  # the page is updated from time to time
            wait_for, lambda: num_running(llm), bool, 10.0, "the sequences ended before the prompts were computed"
        )
        assert not any(reader.done() for reader in readers), "a stream ended before the prompts were computed"
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


@pytest.mark.parametrize("roles", ["both", "split"])
async def test_a_prompt_is_computed_in_shorter_steps_with_the_same_tokens(
    roles: str, checkpoint: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    settings = {"num_blocks": 12_000, "max_model_len": 8192, "roles": roles, "max_num_batched_tokens": 128}
    with LLM(str(checkpoint), max_itl=0.0, **settings) as llm:
        async with decoding(llm):
            free = await send(llm)
        free_chunks = [num_chunks(collector, trace_id) for _, trace_id in free]
    with LLM(str(checkpoint), max_itl=UNREACHABLE_MS, **settings) as llm:
        async with decoding(llm):
            limited = await send(llm)
        limited_chunks = [num_chunks(collector, trace_id) for _, trace_id in limited]
    assert [tokens for tokens, _ in free] == [tokens for tokens, _ in limited]
    assert free_chunks == [2, 2]
    assert limited_chunks == [11, 11]  # of at most 16 tokens each
