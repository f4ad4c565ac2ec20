"""Leases, fencing, quarantine and calls without an answer, with a real Redis and real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from block_store.errors import Exhausted, Fenced, LedgerUnavailable
from block_store.ledger.client import LedgerClient
from block_store.ledger.reaper import sweep
from block_store.ledger.scripts import CallId, LedgerScripts
from block_store.redis import redis_server
from block_store.redis.redis_server import RedisHandle
from common.types import BlockRef
from testing.ledger.store import TestStore, chain, wait_until


def test_beats_keep_a_lease_and_silence_loses_it(store: TestStore) -> None:
    lives = LedgerClient.register(store.ledger, "lives", writer_slot=1, lease_s=20.0, beat_s=0.1)
    silent = LedgerClient.register(store.ledger, "silent", writer_slot=2, lease_s=0.4, beat_s=None)
    silent_blocks = silent.alloc(2)
    lease = store.client.zscore(store.ledger.tag + "leases", str(lives.epoch))
    time.sleep(0.7)
    wait_until(lambda: store.client.zscore(store.ledger.tag + "leases", str(lives.epoch)) > lease + 500)
    assert store.ledger.reap(gap_s=600).reaped == (silent.epoch,)
    assert len(lives.alloc(1)) == 1 and lives.lease.num_available > 0
    with pytest.raises(Fenced):
        silent.alloc(1)
    silent.release(silent_blocks)
    lives.close()
    assert store.moment().counts.quarantine == 2 and not store.moment().holders
    store.check()


def test_a_beat_learns_of_the_fence_and_says_so_once(store: TestStore) -> None:
    told: list[int] = []
    event = threading.Event()

    def on_fenced() -> None:
        told.append(1)
        event.set()

    holder = LedgerClient.register(store.ledger, "w", writer_slot=1, beat_s=0.05, on_fenced=on_fenced)
    store.expire(holder.epoch)
    while not store.ledger.reap().reaped and not event.is_set():
        store.expire(holder.epoch)
    assert event.wait(60) and holder.fenced.is_set()
    with pytest.raises(Fenced):
        holder.holdings()
    assert told == [1]
    holder.close()


WRITER = """if True:
    import sys, time
    from block_store.arena.arena import Arena
    from block_store.holder.held_blocks import HeldBlocks
    from block_store.ledger.client import LedgerClient
    from block_store.ledger.scripts import LedgerScripts
    from block_store.redis.redis_server import open_client
    from testing.ledger.store import chain
    from block_store.ledger.codec import SealItem
    arena = Arena.open(sys.argv[1])
    slot = arena.acquire_writer_slot()
    client = open_client(sys.argv[2], arena.fixed.run_id)
    ledger = LedgerScripts.attach(client, arena)
    held = HeldBlocks(LedgerClient.register(ledger, "w", writer_slot=slot.number), arena, slot)
    refs = held.alloc(5)
    held.seal([SealItem(ref, h) for ref, h in zip(refs[:3], chain("a", 3))])
    print(slot.number, held.epoch, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_writer_wrote_waits_for_its_slot(store: TestStore, redis_handle: RedisHandle) -> None:
    """The unsealed blocks of a suspended process stay in quarantine until it dies. Its sealed blocks stay available."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(store.arena.directory), redis_handle.url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    slot, epoch = (int(word) for word in process.stdout.readline().split())
    process.send_signal(signal.SIGSTOP)
    sweep(store.ledger, store.arena, ())  # after a gap between sweeps, no holder is reaped
    store.expire(CallId(epoch, 0).epoch)  # type: ignore[arg-type]
    report = sweep(store.ledger, store.arena, ())
    assert report.reaped == (epoch,) and report.waiting_slots == (slot,)
    for _ in range(3):
        report = sweep(store.ledger, store.arena, report.waiting_slots)
        assert store.moment().counts.quarantine == 2
    me = store.held()
    assert len(me.acquire([chain("a", 9)])[0]) == 3
    with pytest.raises(Exhausted):
        me.alloc(8)
    process.send_signal(signal.SIGKILL)
    process.wait()
    report = sweep(store.ledger, store.arena, report.waiting_slots)
    assert report.num_unquarantined == 2 and report.waiting_slots == ()
    assert len(me.alloc(9)) == 9
    store.check()
    me.close()


def test_a_dead_writers_blocks_are_free_after_one_sweep(store: TestStore) -> None:
    dead = store.caller()
    store.ledger.alloc(dead.lane(), 4)
    dead.slot.close()
    store.expire(dead.epoch)
    assert sweep(store.ledger, store.arena, ()).num_unquarantined == 4
    assert store.moment().counts.free == 12


class Forgetful(LedgerScripts):
    """A ledger that loses some answers: the operation takes effect, and the caller gets no answer."""

    lose = 0

    def _execute(self, name: str, *args: bytes | str | int) -> object:
        answer = super()._execute(name, *args)
        if self.lose and name in ("alloc", "acquire", "seal", "hand_over", "claim", "release"):
            self.lose -= 1
            raise LedgerUnavailable(f"{name}: the answer was lost")
        return answer


def forgetful(store: TestStore) -> Forgetful:
    store.ledger = Forgetful(store.client, store.ledger.arena_id, store.ledger.dataset)
    return store.ledger


@pytest.mark.parametrize("lost", [1, 3])
def test_an_unanswered_call_is_repeated_and_happens_once(store: TestStore, lost: int) -> None:
    ledger = forgetful(store)
    holder = LedgerClient.register(ledger, "w", writer_slot=1, beat_s=None)
    ledger.lose = lost
    refs = holder.alloc(3)
    assert holder.holdings() == refs and store.moment().counts.reserved == 3


def test_readings_between_beats_do_not_look_like_an_older_ledger(store: TestStore) -> None:
    held = store.held()
    held.alloc(1)
    for _ in range(3):
        held.holder.holdings()
        held.holder.lease.beat()


def test_a_call_given_up_is_settled_before_the_next(store: TestStore) -> None:
    """The caller is gone. The references that the call has acquired must not leak."""
    ledger = forgetful(store)
    held = store.held()
    held.holder.lane.budget_s = -1.0
    kept = held.alloc(2)
    attempts: list[Callable[[], object]] = [
        lambda: held.alloc(3), lambda: held.acquire([chain("a", 2)]), lambda: held.release(kept[:1]),
    ]  # fmt: skip
    for attempt in attempts:
        ledger.lose = 1
        with suppress(LedgerUnavailable):
            attempt()
        assert not ledger.lose and held.holder.breaker.is_open
        held.holder.lease.probe()
    extra = held.alloc(1)
    assert set(held.holder.holdings()) == {kept[1], *extra}
    held.release([kept[1]])
    held.release(extra)
    held.assert_idle()
    store.check()


def test_a_frozen_redis_delays_calls_and_repeats_none_twice(shm: Path) -> None:
    directory = tempfile.mkdtemp(prefix="ll-redis-")
    redis = redis_server.connect(None, directory)
    assert redis.process is not None
    store = TestStore(redis.client, shm / "arena")
    redis.client.connection_pool.connection_kwargs["socket_timeout"] = 0.2
    redis.client.connection_pool.disconnect()
    held, refs = store.held(), list[BlockRef]()
    os.kill(redis.process.pid, signal.SIGSTOP)
    wake = threading.Timer(0.7, os.kill, (redis.process.pid, signal.SIGCONT))
    wake.start()
    held.holder.lane.budget_s = 60.0
    refs = held.alloc(4)
    wake.join()
    redis.client.connection_pool.connection_kwargs["socket_timeout"] = 60.0
    redis.client.connection_pool.disconnect()
    assert held.holder.holdings() == refs and store.moment().counts.reserved == 4
    held.close()
    redis.close()
    shutil.rmtree(directory)
