"""Cached prefixes: no worker recomputes a prefix that was served before."""

from __future__ import annotations

import asyncio

from looseleaf import LLM, AsyncClient
from testing.system import prompts

BLOCK = 16


def test_a_prompt_served_before_computes_at_most_one_block(llm: LLM) -> None:
    for length in (1, 15, 16, 17, 32, 100, 333):
        [prompt] = prompts(1, seed=100 + length, lengths=(length, length))
        first = llm.client.generate(prompt, max_tokens=4, temperature=0.0).usage
        assert (first.cached_tokens, first.computed_tokens) == (0, length)
        again = llm.client.generate(prompt, max_tokens=4, temperature=0.0).usage
        assert again.computed_tokens <= BLOCK
        assert again.cached_tokens == (length - 1) // BLOCK * BLOCK
        assert again.cached_tokens + again.computed_tokens == again.prompt_tokens == length


def test_the_second_turn_of_a_chat_hits_what_decode_published(llm: LLM) -> None:
    [prompt] = prompts(1, seed=8, lengths=(50, 50))
    first = llm.client.generate(prompt, max_tokens=60, temperature=0.0, ignore_eos=True)
    turn = [*prompt, *first.token_ids, *prompts(1, seed=9, lengths=(20, 20))[0]]
    second = llm.client.generate(turn, max_tokens=4, temperature=0.0).usage
    # The newest token of the first turn was not computed, so 109 of its 110 positions have KV.
    assert second.cached_tokens == 109 // BLOCK * BLOCK
    assert second.computed_tokens == len(turn) - second.cached_tokens


def test_salts_keep_prefixes_apart(llm: LLM) -> None:
    [prompt] = prompts(1, seed=10, lengths=(80, 80))
    for salt in ("a", "b"):
        assert llm.client.generate(prompt, max_tokens=1, cache_salt=salt).usage.cached_tokens == 0
        assert llm.client.generate(prompt, max_tokens=1, cache_salt=salt).usage.cached_tokens == 64


async def test_load_spreads_and_any_worker_serves_what_another_has_filled(two_by_two: LLM) -> None:
    many = prompts(40, seed=11, lengths=(100, 200))
    async with AsyncClient(two_by_two.addresses.grpc) as client:
        await asyncio.gather(*(client.generate(p, max_tokens=16, ignore_eos=True) for p in many))
        again = await asyncio.gather(*(client.generate(p, max_tokens=16, ignore_eos=True) for p in many))
    assert all(item.usage.computed_tokens <= BLOCK for item in again)
    served = two_by_two.requests_by_worker()
    for role in ("prefill", "decode"):
        counts = [count for name, count in served.items() if name.startswith(role)]
        assert len(counts) == 2 and sum(counts) >= 80 and min(counts) >= 16, served
