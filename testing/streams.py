"""Runs streams at once, and disturbs the system in the middle of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from looseleaf import AsyncClient

FLOWING = 5
"""The number of tokens after which a stream counts as flowing."""


async def run_streams(
    address: str,
    prompts: Sequence[Sequence[int]],
    options: Sequence[dict[str, Any]],
    *,
    salt: str,
    disturb: Callable[[], None] = lambda: None,
) -> list[tuple[int, ...]]:
    """Runs all prompts at once, with each of `options` in turn, on the gateway at the gRPC `address`. Calls `disturb`
    in a thread when every stream has received FLOWING tokens. Returns the outputs' token ids. Raises the first error of
    a stream.
    """
    started = [asyncio.Event() for _ in prompts]

    async def one(client: AsyncClient, index: int) -> tuple[int, ...]:
        tokens: list[int] = []
        stream = client.stream(prompts[index], **options[index % len(options)], cache_salt=salt)
        async for piece in stream:
            tokens += piece.token_ids
            if len(tokens) >= FLOWING:
                started[index].set()
        return tuple(tokens)

    async with AsyncClient(address) as client:
        tasks = [asyncio.create_task(one(client, index)) for index in range(len(prompts))]
        everybody = asyncio.gather(*tasks)  # raises on the first failure
        flowing = asyncio.gather(*(event.wait() for event in started))
        both: list[asyncio.Future[Any]] = [everybody, flowing]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if flowing.done():
            await asyncio.to_thread(disturb)
        return list(await everybody)
