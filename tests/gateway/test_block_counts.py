"""The numbers of blocks of several arenas, from real block stores."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.fleet.block_counts import BlockCounter, BlockCounts
from testing.ledger.hosts import Host
from testing.ledger.store import LAYOUT, chain


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ll-test-") as directory:
        made = [Host(Path(directory) / name, num_blocks) for name, num_blocks in (("a", 16), ("b", 24))]
        yield made
        for host in made:
            host.stop()


async def counted(counter: BlockCounter, addresses: list[str], num_sealed: int) -> BlockCounts:
    """Counts until so many blocks are sealed: a store that does not answer in time keeps its last numbers."""
    async with asyncio.timeout(60):
        while (counts := await counter.count(addresses)).by_state["sealed"] != num_sealed:
            pass
    return counts


async def test_the_blocks_of_all_arenas_are_counted_and_a_silent_store_keeps_its_last_numbers(
    hosts: list[Host],
) -> None:
    counter, addresses = BlockCounter(), [host.store.address for host in hosts]
    assert await counter.count([]) == BlockCounts()
    hosts[0].fill(chain("a", 3), partial=True)
    hosts[1].fill(chain("b", 5))
    both = await counted(counter, addresses, 9)
    assert both.by_state["free"] == 40 - 9
    assert (both.block_bytes, both.kv_dtype, both.block_size) == (LAYOUT.block_bytes, "bfloat16", LAYOUT.block_size)
    hosts[1].store.process.kill()
    hosts[0].fill(chain("c", 2))
    without_answer = await counted(counter, addresses, 11)
    assert without_answer.by_state["free"] == 40 - 11
    assert (await counter.count(addresses[:1])).by_state["sealed"] == 6
    await counter.close()
