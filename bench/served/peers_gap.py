"""Measures the longest gap between two tokens of running decodes while a long prompt is computed, at any server with
OpenAI's API.

Prompts are random token ids, so every server computes the same number of tokens, whatever its tokenizer. The answers
contain token ids, so that a token whose text is not complete makes an event too.
"""

from __future__ import annotations

import asyncio
import functools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

SHORT_LEN, WARM_TOKENS = 64, 24
AFTER_S = 0.25
MOST_TOKENS = 1500
"""How many tokens a decode may generate. It must not end before the measurement does."""
Follow = Callable[[Sequence[int], int, list[float]], Coroutine[Any, Any, None]]
"""Sends a prompt that asks for a number of tokens, and appends the time of each event of the answer to the list."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """The measured gaps between two events of a stream, in ms."""

    usual_ms: float
    """The median before the long prompt was sent."""
    worst_ms: float
    """The longest gap of all streams from when the long prompt was sent until shortly after its first token."""
    ttft_ms: float
    """The long prompt's time to first token."""


async def events(client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[float]:
    """Yields the time of every event except [DONE]. Raises RuntimeError if the server answers with an error."""
    body = {
        "model": "m", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"{reply.status_code}: {(await reply.aread()).decode()[:300]}")
        async for line in reply.aiter_lines():
            if line.startswith('data: {"error"'):
                raise RuntimeError(line[:300])
            if line.startswith("data:") and line[5:].strip() != "[DONE]":
                yield time.perf_counter()


async def follow(client: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, stamps: list[float]) -> None:
    async for at in events(client, prompt, max_tokens):
        stamps.append(at)


async def http_gaps(url: str, streams: int, prompt_len: int, seed: int, most_tokens: int) -> Gaps:
    """Measures the server at `url` as `gaps` does."""
    timeout, limits = httpx.Timeout(600.0), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:
        return await gaps(functools.partial(follow, client), streams, prompt_len, seed, most_tokens)


async def gaps(follow: Follow, streams: int, prompt_len: int, seed: int, most_tokens: int = MOST_TOKENS) -> Gaps:
    """Runs `streams` decodes, and sends a prompt of `prompt_len` tokens when each stream has WARM_TOKENS tokens. Raises
    RuntimeError if the server rejects a request, or if a stream has `most_tokens` tokens before the measurement ends.
    """
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, 500) for _ in range(length)]

    stamps: list[list[float]] = [[] for _ in range(streams)]
    answered: list[float] = []
    tasks = [asyncio.create_task(follow(prompt(SHORT_LEN), most_tokens, seen)) for seen in stamps]
    try:
        await reached(stamps, tasks, lambda seen: len(seen) >= WARM_TOKENS)
        sent = time.perf_counter()
        await follow(prompt(prompt_len), 1, answered)
        first = answered[0]
        await reached(stamps, tasks, lambda seen: bool(seen) and seen[-1] > first + AFTER_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return summarise(stamps, sent, first)


async def reached(
    stamps: Sequence[list[float]], tasks: Sequence[asyncio.Task[None]], enough: Callable[[list[float]], bool]
) -> None:
    """Waits until `enough` is true for every stream. Raises RuntimeError if a stream ends before that."""
    while not all(map(enough, stamps)):
        for task in tasks:
            if task.done():
                task.result()
                raise RuntimeError("a stream ended before the end of the measurement; use more tokens")
        await asyncio.sleep(0.01)


def summarise(stamps: Sequence[Sequence[float]], sent: float, first: float) -> Gaps:
    """Returns the gaps, computed from the times of the streams' events. The worst gap is the longest of those that end
    after `sent` and begin before `first` + AFTER_S.
    """
    pairs = [pair for seen in stamps for pair in pairwise(seen)]
    usual = [later - earlier for earlier, later in pairs if later <= sent]
    worst = max(later - earlier for earlier, later in pairs if later > sent and earlier < first + AFTER_S)
    return Gaps(*(round(1e3 * value, 2) for value in (statistics.median(usual), worst, first - sent)))


def measure(url: str, streams: int, prompt_len: int, seed: int, most_tokens: int = MOST_TOKENS) -> Gaps:
    """Measures the server at `url` as `gaps` does."""
    return asyncio.run(http_gaps(url, streams, prompt_len, seed, most_tokens))
