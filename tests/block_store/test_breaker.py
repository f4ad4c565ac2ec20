"""A worker whose Redis does not answer: it uses its reserve, shares no blocks, and later makes the missed calls."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from block_store.errors import LedgerUnavailable
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.inspection import HolderView
from block_store.ledger.lane import Attempt
from block_store.ledger.rebuild import rebuild
from block_store.ledger.scripts import CHUNK, LedgerScripts
from block_store.redis import redis_server
from block_store.redis.redis_server import RedisHandle
from common.ticket import Ticket
from common.types import BlockRef
from testing.ledger.store import TestStore, chain, content, indexed, wait_until

T = TypeVar("T")
PATIENCE_S = 4.0
"""Seconds after which a call counts as unanswered. A Redis that merely waits for a core answers sooner."""


@dataclass
class Silenceable:
    """A store in a private Redis that can stop answering."""

    handle: RedisHandle
    store: TestStore

    def worker(self, reserve: int = 0) -> HeldBlocks:
        arena = self.store.arena
        slot, client = arena.acquire_writer_slot(), self.client()
        holder = LedgerClient.register(
            LedgerScripts.attach(client, arena), "worker", writer_slot=slot.number, beat_s=None
        )
        return HeldBlocks(holder, arena, slot, reserve)

    def client(self) -> redis_server.redis.Redis:
        return redis_server.open_client(self.handle.url, lambda: self.store.arena.fixed.run_id, PATIENCE_S)

    def freeze(self) -> None:
        assert self.handle.process is not None
        os.kill(self.handle.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        assert self.handle.process is not None
        os.kill(self.handle.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        assert self.handle.process is not None
        old = self.handle.process
        old.kill()
        wait_until(lambda: self.handle.process is not old)

    def build_anew(self) -> None:
        assert self.handle.follow()
        self.store.ledger = self.store.ledger.under(rebuild(self.handle.client, self.store.arena))


@pytest.fixture
def silenceable(shm: Path) -> Iterator[Silenceable]:
    directory = Path(tempfile.mkdtemp(prefix="ll-redis-"))
    handle = redis_server.connect(None, directory)
    yield Silenceable(handle, TestStore(handle.client, shm / "arena", num_blocks=24))
    handle.close()
    shutil.rmtree(directory)


def items(held: HeldBlocks, refs: list[BlockRef], name: str) -> list[SealItem]:
    """Writes `refs`. Returns the items to seal."""
    hashes = chain(name, len(refs))
    for ref, prefix_hash in zip(refs, hashes, strict=True):
        held.arena.data[ref.block] = content(prefix_hash)
    return [SealItem(*pair) for pair in zip(refs, hashes, strict=True)]


def tables_of(refs: list[BlockRef]) -> tuple[tuple[tuple[BlockRef, ...], ...], ...]:
    return ((tuple(refs),),)


def reconnect(*workers: HeldBlocks) -> None:
    for held in workers:
        wait_until(lambda held=held: held.holder.lease.probe() or not held.holder.breaker.is_open)  # type: ignore[misc]


def test_a_silent_redis_stops_nothing_that_needs_no_ledger(silenceable: Silenceable) -> None:
    held, decode, store = silenceable.worker(reserve=4), silenceable.worker(), silenceable.store
    old = held.seal(items(held, held.alloc(2), "old"))
    [waiting] = held.alloc(1)
    ticket = Ticket(store.arena.arena_id, held.hand_over(tables_of(held.seal([SealItem(waiting)]))), (), (16,))
    held.top_up()
    silenceable.freeze()
    new = held.alloc(3)
    assert held.num_reserved == 1 and not held.holder.breaker.is_open, "from the reserve, without a call"
    assert held.seal(items(held, new, "new")) == new and held.holder.breaker.is_open
    assert held.acquire([chain("old", 2)]) == [[]]
    held.share(new[:2])
    held.release([*new[:2], new[2]])
    held.release(old[1:])
    assert held.num_held == 3 and held.num_free_hint == 1
    with pytest.raises(LedgerUnavailable):
        held.alloc(2)
    last = held.alloc(1)
    assert held.arena.check_refs([*new, *last])
    with pytest.raises(LedgerUnavailable):
        held.hand_over(tables_of([old[0], *new[:2]]))
    claiming = Attempt()
    with pytest.raises(LedgerUnavailable):
        decode.claim(ticket, claiming)
    assert held.num_held == 4 and held.holder.breaker.num_refused >= 4
    assert held.fallbacks.counts == {
        "seal not acknowledged": 1, "no prefix looked up": 1, "release not acknowledged": 2,
    }  # fmt: skip

    silenceable.wake()
    reconnect(held, decode)
    ticket_id = held.hand_over(tables_of([old[0], *new[:2]]))
    assert indexed(store.ledger, [chain("new", 3)]) == 3, "sealed late, the released tail too"
    assert decode.claim(Ticket(store.arena.arena_id, ticket_id, tables_of([old[0], *new[:2]]), (48,)))
    decode.claim(ticket, claiming)
    held.release(last)
    held.assert_idle()
    store.check()
    assert store.moment().counts.reserved == held.num_reserved


def test_redis_killed_while_blocks_are_sealed_and_given_up(silenceable: Silenceable) -> None:
    """The ledger is rebuilt from the header, which has the seals. It then receives the other calls."""
    held, store = silenceable.worker(reserve=6), silenceable.store
    kept = held.seal(items(held, held.alloc(2), "kept"))
    gone = held.seal(items(held, held.alloc(2), "gone"))
    held.top_up()
    silenceable.kill()
    late = held.seal(items(held, held.alloc(2), "late"))
    [partial, writing] = held.alloc(2)
    held.seal([SealItem(partial)])
    held.release(gone)
    silenceable.build_anew()
    too_late = items(held, [writing], "writing")
    assert held.seal(too_late) == [writing], "sealed after the ledger was built, before this worker is in it"
    reconnect(held)
    held.top_up()
    assert set(held.holder.holdings()) == {*kept, *late, partial, writing, *held._reserve}
    for name, length in (("kept", 2), ("gone", 2), ("late", 2), ("writing", 1)):
        assert indexed(store.ledger, [chain(name, 9)]) == length, name
    store.check()
    held.hand_over(tables_of([*kept, *late, writing, partial]))
    held.assert_idle()


@contextmanager
def unheard(*names: str) -> Iterator[None]:
    """Loses the answers to these operations, which the ledger executes."""
    execute = LedgerScripts._execute

    def lose(self: LedgerScripts, name: str, *args: bytes | str | int) -> object:
        answer = execute(self, name, *args)
        if name in names:
            raise LedgerUnavailable("the answer was lost")
        return answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LedgerScripts, "_execute", lose)
        yield


def tickets(store: TestStore) -> list[HolderView]:
    return [holder for holder in store.moment().holders if holder.kind == "ticket"]


def test_a_hand_over_whose_answer_is_lost_is_one_hand_over(silenceable: Silenceable) -> None:
    held, store = silenceable.worker(), silenceable.store
    refs = held.seal(items(held, held.alloc(3), "a"))
    attempt = Attempt()
    with unheard("hand_over"), pytest.raises(LedgerUnavailable):
        held.hand_over(tables_of(refs), attempt)
    assert held.num_held == 3 and held.holder.breaker.is_open
    held.holder.lease.probe()
    assert held.alloc(1), "other calls may come in between"
    ticket_id = held.hand_over(tables_of(refs), attempt)
    [ticket] = tickets(store)
    assert ticket.epoch == ticket_id.epoch and ticket.num_references == 3
    assert held.num_held == 1
    store.check()


@pytest.mark.parametrize("settled", [False, True])
def test_the_answer_to_a_hand_over_is_for_nobody_else(silenceable: Silenceable, settled: bool) -> None:
    """The first caller gives up. Then the same prompt comes again, with the same blocks. It gets a new ticket, and the
    references of the first ticket are released.
    """
    held, store = silenceable.worker(), silenceable.store
    refs = held.seal(items(held, held.alloc(3), "a"))
    attempt = Attempt()
    with unheard("hand_over"), pytest.raises(LedgerUnavailable):
        held.hand_over(tables_of(refs), attempt)
    held.holder.lease.probe()
    [old] = tickets(store)
    if settled:  # by a call that was made before the caller gave up
        held.alloc(0)
        held.holder.holdings()
    held.forget(attempt)
    held.release(refs)
    assert held.acquire([chain("a", 3)]) == [refs]
    ticket = held.hand_over(tables_of(refs), Attempt())
    assert [seen.epoch for seen in tickets(store)] == [ticket.epoch] != [old.epoch]
    held.assert_idle()
    store.check()


@pytest.mark.parametrize("answer", ["hand_over", "claim"])
def test_tables_of_more_blocks_than_a_call_takes(redis_handle: RedisHandle, shm: Path, answer: str) -> None:
    """The tables are handed over and claimed in parts. The answer to each call is lost once."""
    store = TestStore(redis_handle.client, shm / "big", num_blocks=2 * CHUNK + 200)
    held, decode = store.held(), store.held()
    for worker in (held, decode):
        worker.holder.lane.budget_s = -1.0
    refs = held.seal(items(held, held.alloc(2 * CHUNK + 10), "a"))
    handing, claiming, lost = Attempt(), Attempt(), 0

    def persistently(worker: HeldBlocks, call: Callable[[], T]) -> T:
        nonlocal lost
        while True:
            with unheard(answer), suppress(LedgerUnavailable):
                return call()
            lost += 1
            worker.holder.lease.probe()
            assert worker.holder.holdings()

    ticket_id = persistently(held, lambda: held.hand_over(tables_of(refs), handing))
    held.assert_idle()
    ticket = Ticket(store.arena.arena_id, ticket_id, tables_of(refs), (16 * len(refs),))
    assert persistently(decode, lambda: decode.claim(ticket, claiming)) == ticket.tables
    assert lost == 3 and decode.num_held == len(refs) and not tickets(store)
    decode.release(refs)
    decode.assert_idle()
    store.check()
    store.close()


def test_a_claim_that_is_given_up_half_way_holds_nothing(redis_handle: RedisHandle, shm: Path) -> None:
    store = TestStore(redis_handle.client, shm / "big", num_blocks=2 * CHUNK + 200)
    held, decode = store.held(), store.held()
    decode.holder.lane.budget_s = -1.0
    refs = held.seal(items(held, held.alloc(2 * CHUNK + 10), "a"))
    ticket = Ticket(store.arena.arena_id, held.hand_over(tables_of(refs)), tables_of(refs), (16 * len(refs),))
    attempt = Attempt()
    with unheard("claim"), pytest.raises(LedgerUnavailable):
        decode.claim(ticket, attempt)
    decode.holder.lease.probe()
    with unheard("claim"), pytest.raises(LedgerUnavailable):
        decode.claim(ticket, attempt)
    decode.holder.lease.probe()
    assert len(attempt.refs) == CHUNK
    decode.decline(ticket, attempt)
    decode.assert_idle()
    held.assert_idle()
    while store.ledger.reap(gap_s=60).more:
        store.check()
    assert store.moment().counts.cached == len(refs)
    store.close()


def test_a_late_seal_of_what_another_has_sealed_meanwhile(silenceable: Silenceable) -> None:
    held, other, store = silenceable.worker(reserve=2), silenceable.worker(), silenceable.store
    held.top_up()
    mine = held.alloc(2)
    held.holder.breaker.open("a test")
    assert held.seal(items(held, mine, "a")) == mine
    theirs = other.seal(items(other, other.alloc(2), "a"))
    held.holder.lease.probe()
    held.release([])
    held.top_up()
    assert set(held.holder.holdings()) == {*mine, *held._reserve}, "their blocks are not wanted any more"
    assert indexed(store.ledger, [chain("a", 2)]) == 2
    held.release(mine)
    held.assert_idle()
    other.release(theirs)
    other.assert_idle()
    store.check()
