"""The floors of workers, as granted by the store, in the ledger and in the registry."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from block_store.errors import Exhausted
from block_store.holder.attach import Needs, attach
from block_store.redis.redis_server import RedisHandle
from block_store.redis.registry import WorkerRegistry
from block_store.server.sizing import granted_floor
from common.group_need import floor_of
from common.kv_retention import KvRules, Retention
from common.settings import WorkerSettings
from common.telemetry import Fallbacks
from common.types import WorkerLoad
from testing.ledger.store import LAYOUT, StoreProcess, line, python, wait_until
from worker.role import record_of

NUM_BLOCKS = 64


class TinyModel:
    """A model with the fields that the registry's record needs."""

    layout = LAYOUT
    weights_bytes = 0
    max_model_len = 64
    model_fingerprint = "00" * 32
    numerics = "none"


def needs(name: str, role: str, floor: int) -> Needs:
    return Needs(name, role, LAYOUT, 0, 0, 64, floor)


@pytest.fixture
def running(shm: Path, redis_handle: RedisHandle) -> Iterator[StoreProcess]:
    store = StoreProcess(shm / "s", "--num-blocks", str(NUM_BLOCKS), "--redis-url", redis_handle.url)
    yield store
    store.stop()


@pytest.mark.parametrize(
    ("num_workers", "num_decode", "num_blocks", "asked"),
    [(2, 1, 64, 4), (4, 2, 224, 28), (4, 3, 4096, 33), (3, 2, 100, 33), (2, 1, 9, 4), (1, 1, 10, 1), (8, 1, 17, 2)],
)
def test_floors_leave_room_for_everybody(num_workers: int, num_decode: int, num_blocks: int, asked: int) -> None:
    floor = granted_floor(asked, "decode", num_blocks, num_workers)
    assert granted_floor(asked, "prefill", num_blocks, num_workers) == asked <= floor
    prefill = (num_workers - num_decode) * asked
    assert num_decode * floor + prefill <= num_blocks - (num_blocks - num_workers * asked) // 2
    if num_decode < num_workers:
        assert num_blocks - num_decode * floor - (prefill - asked) >= floor, "it can be prefilled"
        if asked * (num_workers + 2) <= num_blocks:
            assert (num_decode + 1) * floor + prefill <= num_blocks, "beside a predecessor's"


def test_floors_that_fill_the_arena_stay_what_was_asked_for() -> None:
    assert granted_floor(32, "decode", 64, 2) == 32 == granted_floor(32, "decode", 50, 2)


def test_workers_register_with_what_they_are_granted_and_say_so(
    running: StoreProcess, redis_handle: RedisHandle
) -> None:
    prefill, decode = attach(running.address, [needs("p", "prefill", 4), needs("d", "decode", 5)])
    granted = 5 + (NUM_BLOCKS - 2 * 5) // 4
    assert (prefill.floor_blocks, decode.floor_blocks) == (4, granted) and floors(running) == {"p": 4, "d": granted}
    with pytest.raises(Exhausted):
        prefill.held.alloc(NUM_BLOCKS - granted + 1)
    taken = prefill.held.alloc(NUM_BLOCKS - granted)
    assert len(decode.held.alloc(granted)) == granted, "the floor was kept free"
    prefill.held.release(taken)

    settings = WorkerSettings(model="tiny")
    record = record_of(needs("d", "decode", 5), decode, TinyModel(), settings)
    assert record.max_group_blocks == granted
    registry = WorkerRegistry(redis_handle.client)
    decode.announce(record, WorkerLoad)
    wait_until(registry.list)
    assert [worker.max_group_blocks for worker in registry.list()] == [granted]
    Fallbacks(logging.getLogger("test")).note("a test's", "so that it is published")
    wait_until(lambda: registry.list()[0].fallbacks.get("a test's") == 1)
    decode.withdraw()
    for worker in (prefill, decode):
        worker.close()


@pytest.mark.parametrize("spare", [0, 5, 200])
def test_workers_whose_floors_differ_register_in_an_arena_of_any_size(
    shm: Path, redis_handle: RedisHandle, spare: int
) -> None:
    """Prefill has a larger `--max-num-batched-tokens` than decode, and the model has windows. The decode worker, which
    registers first, leaves room for the prefill worker's floor.
    """
    groups = (Retention(), Retention(512))
    prefill = floor_of("prefill", 1024, KvRules(16, groups, prefill_step=512))
    decode = floor_of("decode", 1024, KvRules(16, groups, prefill_step=64))
    assert prefill > decode + 10
    num_blocks = prefill + decode + spare
    flags = ("--keep-arena", "--num-blocks", str(num_blocks), "--redis-url", redis_handle.url)
    store = StoreProcess(shm / "s", *flags)
    workers = attach(store.address, [needs("d", "decode", decode), needs("p", "prefill", prefill)])
    granted = decode + max(0, num_blocks - 2 * prefill) // 4
    assert floors(store) == {"d": granted, "p": prefill} and granted + prefill <= num_blocks
    for worker in workers:
        worker.close()
    store.stop()
    again = StoreProcess(shm / "s", *flags)  # it has not seen the prefill worker
    assert again.attach("d", "decode", floor=decode).floor_blocks == granted
    again.stop()


def test_one_worker_more_than_the_store_was_told_of(running: StoreProcess, caplog: pytest.LogCaptureFixture) -> None:
    """The worker gets the floor that it requests. If it rejoins while others are away, it gets no more than before,
    because otherwise they could not rejoin.
    """
    told_of = attach(running.address, [needs("d0", "decode", 12), needs("d1", "decode", 12)])
    granted = 12 + (NUM_BLOCKS - 2 * 12) // 4
    assert floors(running) == {"d0": granted, "d1": granted}
    [late] = attach(running.address, [needs("d2", "decode", 12)])
    assert late.floor_blocks == 12 and floors(running)["d2"] == 12
    assert "floor of 12 blocks, not 22" in caplog.text
    told_of[0].close()
    late.renew()
    assert late.floor_blocks == 12 and floors(running) == {"d1": granted, "d2": 12}
    told_of[1].renew()
    assert told_of[1].floor_blocks == granted == floors(running)["d1"]
    for worker in (told_of[1], late):
        worker.close()


def test_the_successor_of_a_killed_worker_gets_the_same_floor(running: StoreProcess) -> None:
    """Until the killed worker is reaped, its floor and its successor's do not fit into the arena together."""
    code = """if True:
        import sys, time
        from block_store.holder.attach import Needs, attach
        from testing.ledger.store import LAYOUT
        [worker] = attach(sys.argv[1], [Needs("d", "decode", LAYOUT, 0, 0, 64, 28)])
        print(worker.floor_blocks, flush=True)
        time.sleep(60)
    """
    killed = python(code, running.address)
    [prefill] = attach(running.address, [needs("p", "prefill", 28)])
    granted = 28 + (NUM_BLOCKS - 2 * 28) // 4
    assert int(line(killed)) == granted
    killed.kill()
    killed.wait()
    [successor] = attach(running.address, [needs("d", "decode", 28)])
    assert successor.floor_blocks == granted and floors(running) == {"d": granted, "p": 28}
    for worker in (prefill, successor):
        worker.close()


def test_a_found_arena_grants_by_its_own_size(shm: Path) -> None:
    flags = ("--expect-workers", "1", "--keep-arena", "--num-blocks")
    store = StoreProcess(shm / "s", *flags, "32")
    first = store.attach("d", "decode", floor=4)
    store.stop()
    again = StoreProcess(shm / "s", *flags, "16")
    assert again.attach("d", "decode", floor=4).floor_blocks == first.floor_blocks == 4 + (32 - 4) // 2
    again.stop()


def floors(store: StoreProcess) -> dict[str, int]:
    """Returns the floors in the ledger."""
    return {holder.name: holder.floor_blocks for holder in store.inspect().holders}
