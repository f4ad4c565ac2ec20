"""Discovery through two real Redis servers, of which one is lost."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from block_store.errors import LedgerUnavailable
from block_store.ledger.prefix_hash import hash_blocks, prompt_chain
from block_store.redis.redis_server import RedisHandle, connect
from block_store.redis.registry import StoreRecord, WorkerRegistry
from common.types import WorkerRecord
from gateway.fleet.discoveries import Discoveries
from gateway.fleet.pull_client import StoreAddress
from gateway.settings import split_urls
from testing.gateway.parts import make_record
from testing.ledger.store import TestStore
from tests.gateway.test_discovery import asking
from tests.gateway.test_requests import until

PROMPT = list(range(10, 10 + 50))


@pytest.fixture
def servers() -> Iterator[list[RedisHandle]]:
    """Two Redis servers that only this test uses, because it kills one of them."""
    with tempfile.TemporaryDirectory(prefix="one") as one, tempfile.TemporaryDirectory(prefix="two") as two:
        handles = [connect(None, directory, confined=False) for directory in (one, two)]
        yield handles
        for handle in handles:
            handle.close()


class Side:
    """An arena with the first `number` blocks of the prompt, its ledger and a prefill worker, in one Redis server."""

    def __init__(self, server: RedisHandle, directory: Path, number: int) -> None:
        self.store = TestStore(server.client, directory / str(number))
        arena = self.store.arena
        record = make_record("prefill", f"p{number}")
        self.record = replace(record, arena_id=arena.arena_id, block_size=16, hash_domain="ab" * 32)
        self.registry = WorkerRegistry(server.client)
        start, _ = prompt_chain(bytes.fromhex(self.record.hash_domain), b"", PROMPT, 0, 16)
        self.store.fill(self.store.caller(), hash_blocks(start, PROMPT[: 16 * number], 16))
        self.publish()

    def publish(self) -> None:
        arena, ledger = self.store.arena, self.store.ledger
        self.registry.publish(self.record)
        self.registry.publish_store(
            StoreRecord(arena.arena_id, f"host:{arena.num_blocks}", ledger.dataset, "", "", arena.num_blocks, 16)
        )


async def test_each_server_has_its_own_arenas_and_its_loss_is_theirs_alone(
    servers: list[RedisHandle], tmp_path: Path
) -> None:
    sides = [Side(server, tmp_path, number) for number, server in enumerate(servers, 1)]
    seen: list[WorkerRecord] = []
    stores: dict[str, StoreAddress] = {}

    def on_records(records: list[WorkerRecord]) -> None:
        seen[:] = records

    def on_stores(found: Mapping[str, StoreAddress]) -> None:
        stores.clear()
        stores.update(found)

    discoveries = Discoveries([server.url for server in servers], 0.05, on_records, on_stores)
    await discoveries.check()
    task = asyncio.create_task(discoveries.run())
    async with asyncio.timeout(60):
        while len(seen) < 2 or len(stores) < 2:
            for side in sides:
                side.publish()
            await asyncio.sleep(0.05)
        arenas = [side.record.arena_id for side in sides]
        while await discoveries.cached_tokens(seen, asking(PROMPT)) != {arenas[0]: 16, arenas[1]: 32}:
            await asyncio.sleep(0.05)

    process = servers[1].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        await lost(discoveries, sides, seen)
    finally:
        process.send_signal(signal.SIGCONT)
    task.cancel()
    discoveries.close()


async def lost(discoveries: Discoveries, sides: list[Side], seen: list[WorkerRecord]) -> None:
    """Checks what holds while the second server does not answer."""
    for _ in range(30):
        sides[0].publish()
        await asyncio.sleep(0.05)
    arenas = [side.record.arena_id for side in sides]
    assert {record.worker_id for record in seen} == {"p1", "p2"}, "workers of a lost server stay known"
    async with asyncio.timeout(60):
        while await discoveries.cached_tokens(seen, asking(PROMPT)) != {arenas[0]: 16}:
            await asyncio.sleep(0.05)
    await discoveries.check()  # one server is enough to start


async def test_a_worker_id_that_two_servers_have_counts_once(
    servers: list[RedisHandle], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for server in servers:
        WorkerRegistry(server.client).publish(make_record("prefill", "same"))
    seen: list[list[WorkerRecord]] = []
    discoveries = Discoveries([server.url for server in servers], 0.05, seen.append, lambda stores: None)
    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(discoveries.run())
        await until(lambda: "two Redis servers have a worker with the id same" in caplog.text)
    assert [record.worker_id for record in seen[-1]] == ["same"]
    task.cancel()
    discoveries.close()


async def test_a_gateway_needs_one_server_that_answers() -> None:
    discoveries = Discoveries(["redis://127.0.0.1:1", "redis://127.0.0.1:2"], 1.0, lambda _: None, lambda _: None)
    with pytest.raises(LedgerUnavailable):
        await discoveries.check()
    discoveries.close()


def test_urls_are_separated_by_commas() -> None:
    assert split_urls("redis://:a,b@one:6379/0,rediss+sentinel://two,three/m,unix:///tmp/s,x") == [
        "redis://:a,b@one:6379/0", "rediss+sentinel://two,three/m", "unix:///tmp/s,x",
    ]  # fmt: skip
