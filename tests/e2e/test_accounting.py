"""After any mix of finished, cancelled and failed requests, no block is held."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc
import pytest

from common.errors import LooseleafError
from looseleaf import LLM, AsyncClient
from testing.system import assert_nothing_held, prompts


async def test_500_requests_a_third_of_them_cancelled(two_by_two: LLM) -> None:
    rng = random.Random(5)
    ends = {"finished": 0, "cancelled": 0, "failed": 0}
    limit = asyncio.Semaphore(48)

    async def one(client: AsyncClient, prompt: list[int], kind: str) -> None:
        async with limit:
            options = {"max_tokens": rng.randint(1, 60), "temperature": 0.0, "ignore_eos": True}
            if kind == "failed":
                with pytest.raises(LooseleafError):
                    await client.generate([*prompt, 1 << 30], **options)  # type: ignore[arg-type]
                ends["failed"] += 1
                return
            task = asyncio.create_task(client.generate(prompt, **options))  # type: ignore[arg-type]
            if kind == "cancelled":
                await asyncio.sleep(rng.random() * 0.3)
                if task.cancel():
                    with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
                        await task
                    ends["cancelled"] += 1
                    return
            await task
            ends["finished"] += 1

    many = prompts(500, seed=12, lengths=(1, 150))
    kinds = ["cancelled"] * 167 + ["failed"] * 33 + ["finished"] * 300
    rng.shuffle(kinds)
    async with AsyncClient(two_by_two.addresses.grpc) as client:
        await asyncio.gather(*(one(client, prompt, kind) for prompt, kind in zip(many, kinds, strict=True)))
    assert ends["finished"] >= 300 and ends["failed"] == 33 and ends["cancelled"] >= 60, ends
    state = assert_nothing_held(two_by_two.addresses.block_store)
    assert state.cached > 0
