"""Discovery of workers through a real Redis, and the startup, refusal to start, and drain of the gateway process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest

from block_store.ledger.prefix_hash import chain_start, hash_blocks
from block_store.redis.redis_server import CALL_TIMEOUT_S, RedisHandle, connect
from block_store.redis.registry import StoreRecord, WorkerRegistry
from common.types import SamplingParams, StoppingParams, WorkerRecord
from gateway.fleet.discovery import MAX_UNANSWERED, Discovery
from gateway.intake.resolved_request import ResolvedRequest
from testing.gateway.parts import Script, make_record
from testing.gateway.scripted_workers import ScriptedWorker
from testing.ledger.store import TestStore
from tests.gateway.test_chat_template import write_model
from tests.gateway.test_requests import until


def asking(prompt_ids: list[int]) -> ResolvedRequest:
    return ResolvedRequest("r", prompt_ids, SamplingParams(), StoppingParams(), 1.0)


async def test_workers_are_found_and_missed(redis_handle: RedisHandle) -> None:
    seen: list[list[WorkerRecord]] = []
    discovery = Discovery(redis_handle.url, 0.05, seen.append)
    registry = WorkerRegistry(redis_handle.client)
    task = asyncio.create_task(discovery.run())
    await seen_alone(registry, seen, "p0")
    async with asyncio.timeout(60):
        while not seen[-1] or not seen[-1][0].draining:
            registry.publish(replace(make_record("prefill", "p0"), draining=True))
            await asyncio.sleep(0.01)
    registry.withdraw("p0")
    await until(lambda: seen[-1] == [])
    task.cancel()
    discovery.close()


GOOD = asdict(make_record("decode", "evil"))
GARBAGE = {
    "no stamp": b"{}",
    "no JSON": b"$now \xff\x00\x1b[31m",
    "another type": b"$now 5",
    "a field too few": b"$now {}",
    "deeply nested": b"$now " + b"[" * 100_000,
    "text for a number": b"$now " + json.dumps(GOOD | {"block_size": "16"}).encode(),
    "no size": b"$now " + json.dumps(GOOD | {"block_size": 0}).encode(),
    "no hex": b"$now " + json.dumps(GOOD | {"hash_domain": "zz"}).encode(),
    "of the future": b"9" * 400 + b" {}",
    "huge": b"x" * 1_000_000,
}


async def seen_alone(registry: WorkerRegistry, seen: list[list[WorkerRecord]], name: str) -> None:
    """Publishes a worker's record until the discovery knows this worker and no other."""
    async with asyncio.timeout(60):
        while not seen or [record.worker_id for record in seen[-1]] != [name]:
            registry.publish(make_record("prefill", name))
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", GARBAGE)
async def test_a_successor_is_found_beside_entries_that_cannot_be_read(redis_handle: RedisHandle, name: str) -> None:
    """Each unreadable entry is skipped and counted, and removed after a minute."""
    client, seen = redis_handle.client, list[list[WorkerRecord]]()
    discovery = Discovery(redis_handle.url, 0.02, seen.append, grace_s=0.1)
    registry = WorkerRegistry(client)
    client.delete("looseleaf:workers", "looseleaf:stores")
    now = f"{client.time()[0]}000".encode()
    for key in ("looseleaf:workers", "looseleaf:stores"):
        client.hset(key, "evil", GARBAGE[name].replace(b"$now", now))
    task = asyncio.create_task(discovery.run())
    await seen_alone(registry, seen, "d0")
    registry.withdraw("d0")
    await seen_alone(registry, seen, "d1")
    assert discovery.skipped["registry entry skipped"] > 0 and discovery.fallbacks.counts == {}
    assert len(client.hget("looseleaf:workers", "evil") or b"") < 200_000, "it is not handed out again and again"
    stamp, _, value = client.hget("looseleaf:workers", "evil").partition(b" ")  # type: ignore[union-attr]
    client.hset("looseleaf:workers", "evil", b"%d %s" % (int(stamp) - 61_000, value))
    assert [r.worker_id for r in registry.list()] == ["d1"] and client.hget("looseleaf:workers", "evil") is None
    task.cancel()
    discovery.close()


async def test_another_type_under_the_registrys_key_goes(redis_handle: RedisHandle) -> None:
    client, registry = redis_handle.client, WorkerRegistry(redis_handle.client)
    for poison in (lambda key: client.set(key, "x"), lambda key: client.rpush(key, "x")):
        client.delete("looseleaf:workers")
        poison("looseleaf:workers")
        assert registry.list() == []
        poison("looseleaf:workers")
        registry.publish(make_record("decode", "d0"))
        assert [r.worker_id for r in registry.list()] == ["d0"]
    registry.withdraw("d0")


async def test_without_redis_the_last_list_stays_and_nothing_hangs(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gw") as directory:
        handle = connect(None, directory)
        seen: list[list[WorkerRecord]] = []
        discovery = Discovery(handle.url, 0.05, seen.append)
        task = asyncio.create_task(discovery.run())
        await seen_alone(WorkerRegistry(handle.client), seen, "p0")
        handle.close()
        await until(lambda: discovery.fallbacks.counts.get("registry", 0) > 1)
        assert seen[-1][0].worker_id == "p0"
        assert await discovery.cached_tokens(seen[-1], asking([1, 2, 3])) == {}
        task.cancel()
        discovery.close()


async def test_a_start_waits_for_a_redis_that_pauses(tmp_path: Path) -> None:
    handle = connect(None, tmp_path)
    assert handle.process is not None
    discovery = Discovery(handle.url, 0.02, lambda records: None)
    handle.process.send_signal(signal.SIGSTOP)
    checking = asyncio.create_task(discovery.check())
    await asyncio.sleep(2 * CALL_TIMEOUT_S)
    assert not checking.done()
    handle.process.send_signal(signal.SIGCONT)
    await checking
    discovery.close()
    handle.close()


async def test_while_redis_is_frozen_only_the_first_lookups_wait_for_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="gw") as directory:
        handle = connect(None, directory)
        store, seen, ids = TestStore(handle.client, tmp_path), list[list[WorkerRecord]](), list(range(40))
        store.fill(store.caller(), hash_blocks(chain_start(b"\0", b""), ids, 16))
        arena_id, registry = store.arena.arena_id, WorkerRegistry(handle.client)
        discovery = Discovery(handle.url, 0.02, seen.append)
        task = asyncio.create_task(discovery.run())

        async def lookups(count: int) -> list[dict[str, int]]:
            return [await discovery.cached_tokens(seen[-1], asking(ids)) for _ in range(count)]

        def publish() -> None:
            record = StoreRecord(arena_id, "127.0.0.1:1", store.ledger.dataset, handle.run_id, "", 12, 16)
            registry.publish_store(record)
            registry.publish(make_record("prefill", "p0", arena_id=arena_id))

        async def is_found() -> None:
            async with asyncio.timeout(60):
                while not seen or await lookups(1) != [{arena_id: 32}]:
                    publish()
                    await asyncio.sleep(0.01)

        await is_found()
        opened, refused = discovery.breaker.num_opened, discovery.breaker.num_refused
        assert handle.process is not None
        handle.process.send_signal(signal.SIGSTOP)
        try:
            assert await lookups(200) == [{}] * 200
        finally:
            handle.process.send_signal(signal.SIGCONT)
        assert discovery.breaker.num_opened == opened + 1, "they waited one after the other"
        assert discovery.breaker.num_refused >= refused + 200 - MAX_UNANSWERED
        await is_found()
        assert not discovery.breaker.is_open
        task.cancel()
        discovery.close()
        store.close()
        handle.close()


@pytest.mark.parametrize("forget", ["flush", "delete"])
async def test_workers_are_not_gone_because_redis_forgot_them(redis_handle: RedisHandle, forget: str) -> None:
    seen: list[list[WorkerRecord]] = []
    discovery = Discovery(redis_handle.url, 0.02, seen.append, grace_s=4.0)
    registry = WorkerRegistry(redis_handle.client)
    task = asyncio.create_task(discovery.run())
    async with asyncio.timeout(60):
        while not seen or len(seen[-1]) < 2:
            for name in ("p0", "p1"):
                registry.publish(make_record("prefill", name))
            await asyncio.sleep(0.01)
    del seen[:]
    if forget == "flush":
        redis_handle.client.flushall()
    else:
        redis_handle.client.delete("looseleaf:workers")
    moved = make_record("prefill", "p0", address="127.0.0.1:2")
    async with asyncio.timeout(60):
        while not seen or all(record.address != moved.address for record in seen[-1]):
            registry.publish(moved)
            await asyncio.sleep(0.01)
        assert [r.worker_id for r in seen[-1]] == ["p0", "p1"] and all(len(records) == 2 for records in seen)
        while [record.worker_id for record in seen[-1]] != ["p0"]:
            registry.publish(moved)
            await asyncio.sleep(0.05)
    registry.withdraw("p0")
    await until(lambda: seen[-1] == [])
    task.cancel()
    discovery.close()


def gateway(model: Path | str, redis_url: str, *flags: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gateway", "--model", str(model), "--redis-url", redis_url, *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **env})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def refused(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


FREE = ("--port", "0", "--grpc-port", "0")


def test_a_start_that_cannot_be_says_why_in_one_sentence(model: Path, redis_handle: RedisHandle) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags, named in [
            (("--port", port, "--grpc-port", "0"), f"port {port} is occupied"),
            (("--port", "0", "--grpc-port", port), f"port {port} is occupied"),
        ]:
            code, stderr = refused(gateway(model, redis_handle.url, *flags))
            assert code == 1 and named in stderr and "Traceback" not in stderr
    for given, url, named in [
        ("/nowhere", redis_handle.url, "/nowhere is not a directory"),
        (model, "redis://127.0.0.1:1", "--redis-url: Redis cannot be reached: "),
        (model, "nonsense", "--redis-url: a Redis URL must be redis://HOST:PORT"),
        (model, "redis+cluster://127.0.0.1:1", "--redis-url: Redis Cluster is not supported"),
        (model, "redis://127.0.0.1:port", "--redis-url: a Redis URL must be redis://HOST:PORT"),
    ]:
        code, stderr = refused(gateway(given, url, *FREE))
        assert code == 1 and named in stderr and "Traceback" not in stderr


def test_a_mistyped_setting_stops_the_start(model: Path, redis_handle: RedisHandle) -> None:
    code, stderr = refused(gateway(model, redis_handle.url, *FREE, LOOSELEAF_GATEWAY_PROT="1"))
    assert code == 2 and "LOOSELEAF_GATEWAY_PROT" in stderr
    code, stderr = refused(gateway(model, redis_handle.url, *FREE, "--max-queue", "0"))
    assert code == 2 and "--max-queue" in stderr
    code, stderr = refused(gateway(model, redis_handle.url, *FREE, "--prot", "1"))
    assert code == 2 and "--prot" in stderr


async def test_the_process_gets_ready_serves_and_lets_running_requests_finish(
    model: Path, redis_handle: RedisHandle, tmp_path: Path
) -> None:
    script = Script(step_s=0.02)
    workers = [ScriptedWorker("prefill", "p0", script), ScriptedWorker("decode", "d0", script)]
    registry = WorkerRegistry(redis_handle.client)
    records = [replace(await w.start(), max_model_len=100) for w in workers]
    ready = tmp_path / "ready"
    process = gateway(model, redis_handle.url, *FREE, "--ready-file", str(ready), "--served-model-name", "m")
    try:
        async with asyncio.timeout(60):
            while not ready.exists():
                for record in records:
                    registry.publish(record)
                await asyncio.sleep(0.1)
        base = "http://" + ready.read_text().splitlines()[0]
        async with httpx.AsyncClient(base_url=base, timeout=60) as client:
            assert (await client.get("/health")).status_code == 200
            models = (await client.get("/v1/models")).json()["data"]
            assert models[0]["id"] == "m" and models[0]["max_model_len"] == 100, "the workers' limit holds"
            running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "the", "max_tokens": 60}))
            await until(lambda: script.submitted)
            process.send_signal(signal.SIGTERM)
            reply = await running
            assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 60
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)
        for record, worker in zip(records, workers, strict=True):
            registry.withdraw(record.worker_id)
            await worker.stop()
