"""Damaged values in Redis are detected, and the ledger is rebuilt. `python -m testing.chaos --scenario redis-garbled`
changes thousands of values at random under load.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from block_store.errors import LedgerDamaged, LedgerUnavailable, StaleDataset
from block_store.holder.attach import Needs, attach
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.block_record import RECORD
from block_store.ledger.codec import SealItem
from block_store.ledger.inspection import inspect
from block_store.ledger.rebuild import rebuild
from block_store.server.fsck import fsck
from common.types import BlockRef, CacheQuota
from testing.chaos.garbled import Garbler
from testing.chaos.redis_process import RedisProcess
from testing.ledger.store import LAYOUT, Caller, StoreProcess, TestStore, chain, content, indexed

HUGE = 1 << 40


def filled(held: HeldBlocks, name: str, n: int) -> list[BlockRef]:
    refs = held.alloc(n)
    for ref, prefix_hash in zip(refs, chain(name, n), strict=True):
        held.arena.data[ref.block] = content(prefix_hash)
    return held.seal([SealItem(*pair) for pair in zip(refs, chain(name, n), strict=True)])


def key(store: TestStore, name: str) -> str:
    return store.ledger.tag + name


def is_void(store: TestStore) -> bool:
    """Returns whether a rebuild has been requested."""
    try:
        indexed(store.ledger, [chain("z", 1)])
    except StaleDataset:
        return True
    return False


def build_anew(store: TestStore, *workers: HeldBlocks) -> None:
    store.ledger = store.ledger.under(rebuild(store.client, store.arena))
    for held in workers:
        held.holder.lease.probe()
    store.check()


def test_a_block_that_the_index_names_under_anothers_hash_is_no_prefix(store: TestStore) -> None:
    held = store.held()
    refs = filled(held, "a", 2)
    held.release(refs)
    store.client.hset(key(store, "index"), chain("b", 1)[0], refs[1].block)  # type: ignore[arg-type]
    assert held.acquire([chain("b", 1)]) == [[]] and is_void(store)
    build_anew(store, held)
    assert held.acquire([chain("a", 2)]) == [refs] and held.acquire([chain("b", 1)]) == [[]]


def test_nobody_seals_into_a_block_of_another_hash(store: TestStore) -> None:
    held = store.held()
    other, *_ = filled(held, "a", 1)
    [own] = held.alloc(1)
    [prefix_hash] = chain("b", 1)
    held.arena.data[own.block] = content(prefix_hash)
    store.client.hset(key(store, "index"), prefix_hash, other.block)  # type: ignore[arg-type]
    assert held.seal([SealItem(own, prefix_hash)]) == [own] and is_void(store)
    build_anew(store, held)
    assert held.acquire([[prefix_hash]]) == [[own]]


LISTED: dict[str, Callable[[TestStore, int], object]] = {
    "free": lambda s, block: s.client.lpush(key(s, "free"), block),
    "free, first in line": lambda s, block: (s.client.delete(key(s, "free")), s.client.lpush(key(s, "free"), block)),
    "cached": lambda s, block: (
        s.client.delete(key(s, "free")), s.client.zadd(key(s, "cached"), {str(block): -1.0}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", LISTED)
def test_a_block_that_somebody_writes_is_given_to_nobody_else(store: TestStore, where: str) -> None:
    writer, other = store.held("writer"), store.held("other")
    [mine] = writer.alloc(1)
    LISTED[where](store, mine.block)
    with pytest.raises(LedgerUnavailable):
        other.alloc(1)
    assert is_void(store) and store.arena.check_refs([mine])
    build_anew(store, writer, other)
    assert mine.block not in {ref.block for ref in other.alloc(5)}


def test_a_block_that_somebody_writes_does_not_come_out_of_quarantine(store: TestStore) -> None:
    writer = store.caller()
    [mine] = store.ledger.alloc(writer.lane(), 1)
    store.client.zadd(key(store, "quarantine"), {str(mine.block): 7})
    store.client.lpop(key(store, "free"))  # so that the counts add up
    with pytest.raises(LedgerDamaged, match="listed in a state that it is not in"):
        store.ledger.reap([7], gap_s=600)


def test_a_block_that_somebody_writes_is_not_evicted_for_a_quota(store: TestStore) -> None:
    caller, quota = store.caller(), CacheQuota(b"t" * 32, 10)
    refs = store.fill(caller, chain("a", 1), quota)
    [mine] = store.ledger.alloc(caller.lane(), 1)
    store.client.zadd(key(store, "cached:1"), {str(mine.block): 0})
    with pytest.raises(LedgerDamaged, match="listed in a state that it is not in"):
        store.ledger.release(caller.lane(), refs)


@pytest.mark.parametrize("number", [0, 2, 2**31, 2**32 - 1])
def test_generations_of_another_ledger_are_not_entered(store: TestStore, number: int) -> None:
    held = store.held()
    before = store.arena.generations.copy()
    store.client.hset(key(store, "meta"), "rebuild", number)
    with pytest.raises(LedgerUnavailable):
        held.alloc(1)
    assert is_void(store) and (store.arena.generations == before).all()
    build_anew(store, held)
    assert held.alloc(1)[0].generation >> 32 == 2


def test_no_epoch_is_given_twice(store: TestStore) -> None:
    caller = store.caller()
    refs = store.fill(caller, chain("a", 1))
    store.client.hincrby(key(store, "meta"), "epoch", -1)
    with pytest.raises(LedgerDamaged, match="epoch is in use"):
        store.ledger.hand_over(caller.lane(), refs)
    store.client.hincrby(key(store, "meta"), "epoch", -1)
    with pytest.raises(LedgerDamaged, match="epoch is in use"):
        store.caller()


SUMS: dict[str, Callable[[TestStore, Caller], object]] = {
    "a free block is gone": lambda s, c: s.client.lpop(key(s, "free")),
    "a free block is there twice": lambda s, c: s.client.lpush(key(s, "free"), 3),
    "a count": lambda s, c: s.client.hincrby(key(s, "meta"), "sealed", 1),
    "records cut off": lambda s, c: s.client.set(key(s, "blocks"), s.client.getrange(key(s, "blocks"), 0, 99)),  # type: ignore[arg-type]
    "blocks beyond the arena": lambda s, c: s.client.hset(key(s, "meta"), "num_blocks", 1000),
    "a floor": lambda s, c: s.client.hset(key(s, "floors"), str(c.epoch), 1000),
    "a floor that is none": lambda s, c: s.client.hset(key(s, "floors"), str(c.epoch), "many"),
    "a lease that does not end": lambda s, c: s.client.zadd(key(s, "leases"), {str(c.epoch): float("inf")}),
    "a lease in far future": lambda s, c: s.client.zadd(key(s, "leases"), {str(c.epoch): HUGE * 10.0}),
    "a writer slot beyond all": lambda s, c: s.client.sadd(key(s, "awaited"), HUGE),
    "a writer slot that is none": lambda s, c: s.client.sadd(key(s, "awaited"), b"\xff"),
    "a holder that is none": lambda s, c: s.client.zadd(key(s, "leases"), {"nobody": 1}),
}  # fmt: skip


@pytest.mark.parametrize("what", SUMS)
def test_the_sweep_finds_what_does_not_add_up(store: TestStore, what: str) -> None:
    caller = store.caller(floor=2)
    store.fill(caller, chain("a", 2))
    store.ledger.reap(gap_s=600)
    SUMS[what](store, caller)
    with pytest.raises(LedgerDamaged):
        store.ledger.reap(gap_s=600)


UNREADABLE: dict[str, Callable[[TestStore, int], object]] = {
    "a state": lambda s, block: s.client.setrange(key(s, "blocks"), block * RECORD.size, b"\x2a"),
    "half a record": lambda s, block: s.client.append(key(s, "blocks"), b"\0"),  # type: ignore[arg-type]
    "a side": lambda s, block: s.client.hset(key(s, "refs"), str(block), b"odd"),
    "an index entry": lambda s, block: s.client.hset(key(s, "index"), b"x" * 32, b"\xff"),  # type: ignore[arg-type]
    "an index entry beyond the arena": lambda s, block: s.client.hset(key(s, "index"), b"x" * 32, HUGE),  # type: ignore[arg-type]
    "a free block beyond the arena": lambda s, block: s.client.lpush(key(s, "free"), HUGE),
    "a lease of no number": lambda s, block: s.client.zadd(key(s, "leases"), {"nobody": HUGE}),
    "another type": lambda s, block: (s.client.delete(key(s, "cached")), s.client.set(key(s, "cached"), 1)),
    "meta of another type": lambda s, block: (s.client.delete(key(s, "meta")), s.client.set(key(s, "meta"), 1)),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_is_damage_and_fsck_says_so(store: TestStore, what: str) -> None:
    refs = store.fill(store.caller(), chain("a", 2))
    UNREADABLE[what](store, refs[0].block)
    with pytest.raises(LedgerDamaged):
        inspect(store.ledger, with_blocks=True)
    [difference] = fsck(store.arena, store.ledger, wait_s=0.0).differences
    assert "cannot be read" in difference, difference
    build_anew(store)


REPLIES: dict[str, tuple[bytes, Callable[[HeldBlocks], object]]] = {
    "alloc": (b"+" + struct.pack("<IQ", 11, (1 << 32) + 1), lambda held: held.alloc(2)),
    "alloc, cut off": (b"+x", lambda held: held.alloc(1)),
    "hand-over": (b"+nobody", lambda held: held.hand_over([[[]]])),
    "a refusal": (b"-EXHAUSTED \xff", lambda held: held.alloc(1)),
}


@pytest.mark.parametrize("name", REPLIES)
def test_a_stored_reply_that_fits_no_call_is_not_taken_for_one(store: TestStore, name: str) -> None:
    """The lane's sequence number is changed too, so that the next call looks like a repetition of the last one."""
    held = store.held()
    held.alloc(1)
    reply, call = REPLIES[name]
    holder = key(store, f"holder:{held.epoch}")
    store.client.hset(holder, mapping={"number": held.holder.lane.number + 1, "reply": reply})
    with pytest.raises(LedgerUnavailable):
        call(held)
    assert is_void(store)


def test_a_lane_that_has_run_ahead_is_damage(store: TestStore) -> None:
    held = store.held()
    store.client.hset(key(store, f"holder:{held.epoch}"), "number", 1000)
    with pytest.raises(LedgerUnavailable):
        held.alloc(1)
    assert is_void(store)
    build_anew(store, held)
    held.alloc(1)


def test_who_cannot_join_a_damaged_ledger_asks_for_another(store: TestStore) -> None:
    held = store.held()
    held.alloc(1)
    store.ledger = store.ledger.under(rebuild(store.client, store.arena))
    store.client.hset(key(store, "meta"), "epoch", "many")
    held.holder.lease.probe()
    assert is_void(store)
    build_anew(store, held)
    held.alloc(1)


@contextmanager
def out_of_memory(redis: RedisProcess) -> Iterator[None]:
    redis.client.config_set("maxmemory", 1)
    yield
    redis.client.config_set("maxmemory", 0)


@contextmanager
def read_only(redis: RedisProcess) -> Iterator[None]:
    redis.client.replicaof("127.0.0.1", "1")
    yield
    redis.client.replicaof("NO", "ONE")


@contextmanager
def busy(redis: RedisProcess) -> Iterator[None]:
    redis.client.config_set("lua-time-limit", 1)

    def run() -> None:
        with suppress(Exception):  # the script is killed
            redis.client.eval("while true do end", 0)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.1)
    yield
    redis.client.script_kill()
    thread.join()


@pytest.mark.parametrize("refusing", [out_of_memory, read_only, busy])
def test_what_redis_refuses_for_a_while_is_no_damage(
    shm: Path, tmp_path: Path, refusing: Callable[[RedisProcess], AbstractContextManager[None]]
) -> None:
    redis = RedisProcess(tmp_path)
    store = TestStore(redis.client, shm)
    held = store.held()
    held.alloc(1)
    with refusing(redis):
        for call in (held.holder.lease.beat, store.ledger.reap):
            with pytest.raises(LedgerUnavailable):
                call()
    assert not is_void(store)
    held.holder.lease.probe()
    held.alloc(1)
    store.check()
    held.close()
    store.close()
    redis.close()


def test_a_worker_comes_back_once_a_damaged_ledger_is_built_anew(shm: Path) -> None:
    process = StoreProcess(shm / "store", "--expect-workers", "1", "--num-blocks", "24")
    try:
        [attached] = attach(process.address, [Needs("w", "decode", LAYOUT, 0, 0, 64, 4)])
        ledger = attached.held.holder.ledger
        ledger.client.hset(f"{ledger.tag}meta", "epoch", "many")
        attached.renew()
        assert attached.arena.rebuild_count == 2 and attached.held.alloc(1)
        attached.close()
    finally:
        log = process.stop()
    assert "will be rebuilt" in log


def test_a_key_that_has_vanished_is_not_a_changed_value(store: TestStore) -> None:
    garbler = Garbler(store.client, random.Random(5))
    assert not garbler._change(b"vanished")
    assert not garbler.changed and not store.client.exists("vanished")
    garbler.burst(3)
    assert garbler.changed.total() == 3 and "none" not in garbler.changed
