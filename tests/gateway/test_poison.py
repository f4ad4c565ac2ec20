"""Deaths are counted once for each worker's life, and forgotten when the request completes."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Internal
from gateway.poison import MOST_REMEMBERED, PoisonList, digest_of

DIGEST = digest_of([1, 2, 3], b"salt")


def test_two_deaths_of_different_workers_make_a_request_poison() -> None:
    poison = PoisonList()
    for _ in range(5):  # five equal requests lost the same worker
        poison.died(DIGEST, "d0@1")
        poison.check(DIGEST)
    poison.died(DIGEST, "d0@2")
    with pytest.raises(Internal):
        poison.check(DIGEST)
    poison.check(digest_of([1, 2, 3], b"another tenant"))


def test_what_completes_is_forgotten_and_so_is_what_is_old() -> None:
    poison = PoisonList()
    poison.died(DIGEST, "a")
    poison.completed(DIGEST)
    poison.died(DIGEST, "b")
    poison.check(DIGEST)
    poison.died(DIGEST, "c")
    for number in range(MOST_REMEMBERED):
        poison.died(digest_of([number], b""), "d")
    poison.check(DIGEST)


async def test_the_struck_are_tried_one_at_a_time() -> None:
    """The second death is the guilty one's alone; whoever was never struck waits for nobody."""
    poison = PoisonList()
    for name in (b"guilty", b"neighbour"):
        poison.died(name, "w0")
    tried: list[bytes] = []

    async def attempt(name: bytes) -> None:
        async with poison.apart(name):
            tried.append(name)
            await asyncio.sleep(0)
            if name == b"guilty":
                poison.died(name, "w1")

    again = [asyncio.create_task(attempt(name)) for name in (b"guilty", b"neighbour", b"guilty")]
    async with poison.apart(b"other"):
        await asyncio.sleep(0)
        assert tried == [b"guilty"]
    results = await asyncio.gather(*again, return_exceptions=True)
    assert tried == [b"guilty", b"neighbour"] and isinstance(results[2], Internal)
    poison.check(b"neighbour")
