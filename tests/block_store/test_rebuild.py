"""Redis loses its data while sweeps and heartbeats run. The ledger is rebuilt, and held blocks stay held."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from block_store.arena.arena import Arena
from block_store.errors import Exhausted, LedgerUnavailable, StaleDataset
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger import invariants
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.inspection import BlockState, inspect
from block_store.ledger.reaper import SWEEP_S, Reaper
from block_store.ledger.rebuild import open_ledger, rebuild
from block_store.ledger.scripts import RELEASE_CHUNK, CallId, LedgerScripts, chunks
from block_store.redis import private_redis, redis_server
from block_store.redis.redis_server import RedisHandle
from block_store.redis.registry import StoreRecord
from common.types import BlockRef
from testing.ledger.store import LAYOUT, TestStore, chain, content, indexed, patient, wait_until

NUM_BLOCKS = 24


@dataclass
class Running:
    """A running store, with its parts connected as in the service."""

    handle: RedisHandle
    arena: Arena
    ledger: LedgerScripts

    def worker(self, reserve: int = 0, beat_s: float | None = 0.05, floor: int = 0) -> HeldBlocks:
        slot, client = (
            self.arena.acquire_writer_slot(),
            redis_server.open_client(self.handle.url, lambda: self.arena.fixed.run_id, 5.0),
        )
        ledger = LedgerScripts.attach(client, self.arena)
        holder = LedgerClient.register(ledger, "worker", writer_slot=slot.number, floor=floor, beat_s=beat_s)
        return HeldBlocks(holder, self.arena, slot, reserve)

    def wait_for_rebuild(self, number: int, *workers: HeldBlocks) -> None:
        wait_until(lambda: self.arena.rebuild_count == number)
        wait_until(lambda: all(w.holder.ledger.dataset == self.arena.fixed.dataset for w in workers))
        wait_until(lambda: not any(w.holder.breaker.is_open for w in workers))

    def check(self) -> None:
        assert not (found := invariants.check(self.ledger)), found


def write(held: HeldBlocks, refs: list[BlockRef], hashes: list[bytes]) -> None:
    for ref, prefix_hash in zip(refs, hashes, strict=True):
        held.arena.data[ref.block] = content(prefix_hash)


def filled(held: HeldBlocks, name: str, n: int) -> list[BlockRef]:
    refs, hashes = held.alloc(n), chain(name, n)
    write(held, refs, hashes)
    return held.seal([SealItem(*pair) for pair in zip(refs, hashes, strict=True)])


@pytest.fixture
def running(shm: Path) -> Iterator[Running]:
    directory = Path(tempfile.mkdtemp(prefix="ll-redis-"))
    handle = redis_server.connect(None, directory, confined=False)
    yield from run(handle, shm)
    shutil.rmtree(directory)


def run(handle: RedisHandle, shm: Path) -> Iterator[Running]:
    arena = Arena.create(shm / "arena", LAYOUT, NUM_BLOCKS)
    ledger = open_ledger(patient(handle.client), arena)
    record = StoreRecord(arena.arena_id, "h:1", ledger.dataset, handle.run_id, "x", NUM_BLOCKS, 16)
    reaper = Reaper(ledger, arena, handle, record)
    reaper.start()
    yield Running(handle, arena, ledger)
    reaper.stop()
    handle.close()


def kill(running: Running) -> None:
    assert running.handle.process is not None
    running.handle.process.kill()


def flush(running: Running) -> None:
    running.handle.client.flushall()


LOSSES: dict[str, Callable[[Running], None]] = {"killed": kill, "flushed": flush}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_was_held_goes_on(running: Running, loss: str) -> None:
    writer, reader, gone = running.worker(reserve=3), running.worker(floor=2), running.worker()
    shared, cached = filled(writer, "a", 3), filled(gone, "c", 2)
    [partial] = writer.alloc(1)
    writer.seal([SealItem(partial)])
    unsealed = writer.alloc(2)
    given_up = writer.alloc(2)
    writer.release(given_up)
    assert reader.acquire([chain("a", 3)]) == [shared]
    gone.close()
    epochs = writer.epoch, reader.epoch

    LOSSES[loss](running)
    running.wait_for_rebuild(2, writer, reader)
    running.check()
    assert min(writer.epoch, reader.epoch) > max(epochs), "numbers of the lost ledger do not come again"
    assert set(writer.holder.holdings()) == {*shared, partial, *unsealed, *writer._reserve}
    assert set(reader.holder.holdings()) == set(shared) and writer.num_reserved >= 3
    moment = inspect(running.ledger, with_blocks=True)
    assert moment.counts.cached == 2 and moment.counts.quarantine == 0
    assert [moment.blocks[ref.block].state for ref in unsealed] == [BlockState.RESERVED] * 2

    assert reader.acquire([chain("c", 9)]) == [cached], "what nobody held is found by its hash"
    write(writer, unsealed, chain("u", 2))
    assert writer.seal([SealItem(*pair) for pair in zip(unsealed, chain("u", 2), strict=True)]) == unsealed
    reader.share(shared)
    decode = running.worker()
    tables = ((tuple(shared),),)
    from common.ticket import Ticket

    assert decode.claim(Ticket(running.arena.arena_id, reader.hand_over(tables), tables, (48,))) == tables
    fresh = decode.alloc(4)
    assert all(ref.generation >> 32 == 2 for ref in fresh) and running.arena.check_refs(fresh)
    running.check()
    for held in (writer, reader, decode):
        held.close()
    counts = inspect(running.ledger).counts
    assert counts.free + counts.cached == NUM_BLOCKS


def test_again_and_again(running: Running) -> None:
    held = running.worker(reserve=2)
    refs = filled(held, "a", 4)
    for number in range(2, 6):
        LOSSES[["killed", "flushed"][number % 2]](running)
        running.wait_for_rebuild(number, held)
        assert held.acquire([chain("a", 4)]) == [refs] and held.arena.check_refs(refs)
        held.release(refs)
        running.check()
    held.release(refs)
    held.assert_idle()
    held.close()


def snapshot(client: redis.Redis) -> dict[bytes, bytes]:
    return {key: client.dump(key) for key in client.keys("*")}  # type: ignore[misc, union-attr]


def test_an_older_snapshot_is_refused(running: Running) -> None:
    """The Redis and the dataset are the same, but the state is older. With it, blocks would be allocated twice."""
    held, other = running.worker(reserve=1), running.worker()
    refs = filled(held, "a", 2)
    old = snapshot(running.handle.client)
    held.release(refs[1:])
    newer = other.alloc(20)
    write(other, newer, chain("n", 20))
    pipe = running.handle.client.pipeline(transaction=True)
    pipe.flushall()
    for key, value in old.items():
        pipe.restore(key, 0, value)
    pipe.execute()
    running.wait_for_rebuild(2, held, other)
    running.check()
    assert running.arena.check_refs([*refs, *newer])
    assert set(other.holder.holdings()) == set(newer)
    fresh = held.alloc(1)
    assert not {ref.block for ref in fresh} & {ref.block for ref in newer}
    held.close()
    other.close()


def test_a_worker_that_meets_an_older_ledger_first_asks_for_a_rebuild(running: Running) -> None:
    """No sweep has run yet. The header shows that an allocated block is still in use, so the worker writes nothing."""
    held = running.worker(reserve=0)
    running.arena.generations[: NUM_BLOCKS - 1] = 9 << 32
    before = running.arena.data.copy()
    with pytest.raises(LedgerUnavailable):
        held.alloc(3)
    assert (running.arena.data == before).all()
    running.wait_for_rebuild(10, held)
    refs = held.alloc(3)
    assert all(ref.generation == (10 << 32) + 1 for ref in refs), "above everything in the header"
    held.release(refs)
    held.assert_idle()
    held.close()


def test_an_index_entry_that_the_header_contradicts(running: Running) -> None:
    held, other = running.worker(), running.worker()
    refs = filled(held, "a", 2)
    running.arena.generations[refs[1].block] += 1
    assert other.acquire([chain("a", 2)]) == [[]] and other.num_held == 0
    running.wait_for_rebuild(2, held, other)
    assert other.acquire([chain("a", 2)])[0][0] == refs[0]
    running.check()
    held.close()
    other.close()


def test_restarted_with_everything(shm: Path) -> None:
    """Redis has an append-only file, so all data is present. This cannot be verified, so the ledger is
    rebuilt anyway.
    """
    directory = Path(tempfile.mkdtemp(prefix="ll-redis-"))
    binary, _ = private_redis.find_server()
    socket = directory / "own.sock"
    command = [
        binary, "--port", "0", "--unixsocket", str(socket), "--dir", str(directory), "--appendonly", "yes",
        "--appendfsync", "always", "--save", "", "--logfile", str(directory / "log"),
    ]  # fmt: skip

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command)
        wait_until(lambda: private_redis._answers(socket))
        return process

    process = start()
    for running in run(redis_server.connect(f"unix://{socket}", directory), shm):
        held = running.worker(reserve=2)
        refs, old = filled(held, "a", 3), running.ledger.dataset
        process.kill()
        process.wait()
        process = start()
        running.wait_for_rebuild(2, held)
        assert running.ledger.dataset != old and set(held.holder.holdings()) == {*refs, *held._reserve}
        running.check()
        with pytest.raises(StaleDataset):
            running.ledger.under(old).alloc(CallId(held.epoch, 99), 1)
        held.close()
    process.terminate()
    process.wait()
    shutil.rmtree(directory)


# --- step by step, in the shared Redis


class Interrupted(LedgerScripts):
    """A ledger that calls `then` before the answer to `alloc` arrives."""

    then: Callable[[], object] = staticmethod(lambda: None)

    def _execute(self, name: str, *args: bytes | str | int) -> object:
        answer = super()._execute(name, *args)
        if name == "alloc":
            self.then()
        return answer


def build_anew(store: TestStore) -> None:
    store.ledger = store.ledger.under(rebuild(store.client, store.arena))


def join(held: HeldBlocks) -> None:
    held.holder.lease.probe()
    assert not held.holder.breaker.is_open


def test_blocks_of_an_answer_that_a_rebuild_overtook_are_not_written(store: TestStore) -> None:
    late, ledger = store.held(), Interrupted(store.client, store.arena.arena_id, store.arena.fixed.dataset)
    late.holder.lane.ledger = ledger
    other: list[BlockRef] = []

    def rebuilt_and_given_to_another() -> None:
        build_anew(store)
        held = store.held()
        other.extend(held.alloc(12))

    ledger.then = rebuilt_and_given_to_another
    with pytest.raises(LedgerUnavailable):
        late.alloc(2)
    assert len(other) == 12 and store.arena.check_refs(other) and late.num_held == 0
    ledger.then = lambda: None
    join(late)
    late.assert_idle()
    store.check()


def test_a_writer_seen_by_the_rebuild_keeps_its_blocks_from_others(
    store: TestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer enters the header, the ledger is rebuilt, and then the writer checks. It writes nothing. No other
    holder gets the blocks until the writer has declared this.
    """
    late = store.held()
    raise_generations = store.arena.raise_generations

    def then_rebuild(refs: list[BlockRef], slot: int) -> None:
        raise_generations(refs, slot)
        build_anew(store)

    with monkeypatch.context() as patched:
        patched.setattr(store.arena, "raise_generations", then_rebuild)
        with pytest.raises(LedgerUnavailable):
            late.alloc(2)
    assert late.num_held == 0 and store.moment().counts.quarantine == 2
    store.check()
    join(late)
    assert store.moment().counts.free == 12
    late.assert_idle()


def test_who_does_not_assert_is_waited_for(store: TestStore) -> None:
    """A hung process's blocks become free when its lock is free if it was writing them, and otherwise after
    one lease.
    """
    hung, held = store.held(), store.held()
    sealed, unsealed = filled(hung, "a", 8), hung.alloc(2)
    store.ledger = store.ledger.under(rebuild(store.client, store.arena, grace_s=60))
    join(held)
    assert len(held.alloc(2)) == 2
    with pytest.raises(Exhausted):
        held.alloc(1)
    report = store.ledger.reap()
    assert report.waiting_slots == (hung.writer_slot.number,) and store.moment().counts.quarantine == 2
    store.client.hset(store.ledger.tag + "meta", "grace_until", 1)
    assert held.alloc(1)[0].block in {ref.block for ref in sealed}, "a lease later it may be evicted"
    assert store.ledger.reap().num_unquarantined == 0
    join(hung)
    assert [ref in hung.holder.holdings() for ref in [*sealed, *unsealed]].count(True) == 9
    assert hung.fallbacks.counts == {"block lost in a rebuild": 1}
    store.check()
    hung.release_many([sealed, unsealed])
    hung.assert_idle()


def test_a_writer_dead_at_the_rebuild_leaves_nothing_behind(store: TestStore) -> None:
    dead, awaited = store.held(), store.held()
    filled(dead, "a", 2)
    dead.alloc(3)
    awaited.alloc(2)
    dead.writer_slot.close()
    build_anew(store)
    assert store.moment().counts.free == 12 - 2 - 2 and store.moment().counts.cached == 2
    awaited.writer_slot.close()
    report = store.ledger.reap()
    assert store.ledger.reap(report.waiting_slots).num_unquarantined == 2
    store.check()


def test_half_a_rejoining_is_made_again(store: TestStore) -> None:
    """The answer to the assertion is lost once, then the holder's lease expires. No block is lost."""
    held = store.held(reserve=2)
    refs = [*filled(held, "a", 2), *held.alloc(1)]
    reserve = set(held._reserve)
    assert reserve
    build_anew(store)
    assert_held = LedgerScripts.assert_held

    def lost(*args: object, **kwargs: object) -> None:
        assert_held(*args, **kwargs)  # type: ignore[arg-type]
        raise LedgerUnavailable("lost")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LedgerScripts, "assert_held", lost)
        held.holder.lease.probe()
    assert held.holder.breaker.is_open
    join(held)
    assert set(held.holder.holdings()) == {*refs, *reserve} and set(held._reserve) == reserve
    build_anew(store)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LedgerScripts, "assert_held", lost)
        held.holder.lease.probe()
    store.expire(held.holder._joining.epoch)  # type: ignore[union-attr]
    store.ledger.reap()
    for _ in range(2):
        held.holder.lease.probe()
    assert set(held.holder.holdings()) == {*refs, *reserve} and set(held._reserve) == reserve
    store.check()


def test_redis_flushed_while_the_ledger_is_written(store: TestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    append = store.client.append

    def append_and_flush(key: str, value: bytes) -> None:
        append(key, value)
        store.ledger.forget()

    with monkeypatch.context() as patched:
        patched.setattr(store.client, "append", append_and_flush)
        with pytest.raises(StaleDataset):
            rebuild(store.client, store.arena)
    with pytest.raises(StaleDataset):
        store.ledger.reap()
    build_anew(store)
    store.check()


def test_a_ledger_is_kept_if_it_is_the_one_and_built_anew_if_not(store: TestStore) -> None:
    me = store.caller()
    refs = store.fill(me, chain("a", 2))
    again = open_ledger(store.client, store.arena)
    assert again.dataset == store.ledger.dataset and again.holdings(me.epoch) == refs
    for number, damage in enumerate(({"dataset": "other"}, {"run_id": "another"}), 2):
        store.client.hset(store.ledger.tag + "meta", mapping=damage)
        store.ledger = open_ledger(store.client, store.arena)
        assert store.arena.rebuild_count == number and indexed(store.ledger, [chain("a", 2)]) == 2
        store.check()


def test_a_damaged_ledger_is_built_anew(running: Running) -> None:
    held = running.worker(reserve=2)
    running.handle.client.set(running.ledger.tag + "cached", "nonsense")
    running.wait_for_rebuild(2, held)
    held.alloc(4)
    running.check()
    held.close()


def test_a_large_reap_comes_in_pieces(store: TestStore, shm: Path) -> None:
    big = TestStore(store.client, shm / "big", num_blocks=1000)
    dead, me = big.caller(), big.caller()
    refs = [ref for part in chunks(chain("a", 900)) for ref in big.fill(dead, part)]
    big.ledger.beat(me.epoch, 600)
    big.expire(dead.epoch)
    report = big.ledger.reap(gap_s=600)
    assert report.reaped == (dead.epoch,) and report.more
    assert big.moment().cached == tuple(ref.block for ref in reversed(refs[-RELEASE_CHUNK:]))
    big.check()
    assert big.ledger.acquire(me.lane(), [chain("a", 9)]) == [refs[:9]], "others go on in between"
    while big.ledger.reap(gap_s=600).more:
        big.check()
    big.check()
    assert big.moment().cached == tuple(ref.block for ref in reversed(refs[9:]))
    big.close()


def test_sweeps_keep_their_distance_also_while_no_ledger_can_be_built(
    store: TestStore, redis_handle: RedisHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swept, sweep = list[float](), Reaper._sweep

    def counted(reaper: Reaper) -> bool:
        swept.append(time.monotonic())
        return sweep(reaper)

    def in_vain(*_: object) -> str:
        raise redis.ConnectionError("not yet")

    monkeypatch.setattr(Reaper, "_sweep", counted)
    record = StoreRecord(store.arena.arena_id, "h:1", store.ledger.dataset, redis_handle.run_id, "x", 12, 16)
    reaper = Reaper(store.ledger, store.arena, redis_handle, record)
    reaper.start()
    with monkeypatch.context() as patched:
        patched.setattr("block_store.ledger.reaper.rebuild", in_vain)
        time.sleep(2.5 * SWEEP_S)
        store.ledger.distrust()
        time.sleep(2.5 * SWEEP_S)
        wait_until(lambda: "the next sweep tries again" in caplog.text)
    wait_until(lambda: store.arena.fixed.dataset != record.dataset)
    reaper.stop()
    tries = caplog.text.count("the next sweep tries again")
    assert 1 <= tries < len(swept) <= (swept[-1] - swept[0]) / SWEEP_S + 2, "one at once after it is built"


def test_cached_blocks_are_spared_for_as_long_as_is_said(store: TestStore) -> None:
    ledger = store.ledger.under(rebuild(store.client, store.arena, grace_s=7))
    until, built = store.client.hmget(ledger.tag + "meta", "grace_until", "last_reap")  # type: ignore[misc]
    assert int(until) - int(built) == 7000
