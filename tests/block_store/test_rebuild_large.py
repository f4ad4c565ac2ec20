"""A rebuild of a large arena, with several writers that each hold more blocks than one call handles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger import rebuild as rebuilding
from block_store.ledger.codec import SealItem
from block_store.ledger.inspection import BlockState
from block_store.ledger.rebuild import rebuild
from block_store.ledger.scripts import CHUNK
from block_store.redis.redis_server import RedisHandle
from common.types import BlockRef
from testing.ledger.store import TestStore, chain, indexed

NUM_EACH = 2 * CHUNK + 7
"""The number of blocks of each kind that one writer holds."""


@pytest.fixture
def large(redis_handle: RedisHandle, shm: Path) -> Iterator[TestStore]:
    made = TestStore(redis_handle.client, shm / "large", num_blocks=12 * NUM_EACH)
    assert made.arena.num_blocks > rebuilding._CHUNK
    yield made
    made.close()


def filled(held: HeldBlocks, name: str, num_blocks: int) -> list[BlockRef]:
    refs, hashes = held.alloc(num_blocks), chain(name, num_blocks)
    return held.seal([SealItem(*pair) for pair in zip(refs, hashes, strict=True)])


def lose(store: TestStore) -> None:
    """Deletes the arena's keys in Redis. The store rebuilds the ledger from the header."""
    store.ledger.forget()
    store.ledger = store.ledger.under(rebuild(store.client, store.arena))


def rejoin(*workers: HeldBlocks) -> None:
    for held in workers:
        held.holder.lease.probe()
        assert not held.holder.breaker.is_open


@pytest.mark.parametrize("order", [1, -1], ids=["", "the last one first"])
def test_every_writer_keeps_all_that_it_holds(large: TestStore, order: int) -> None:
    names = ("a", "b", "c")
    workers = [large.held(name) for name in names]
    sealed = [filled(held, name, NUM_EACH) for held, name in zip(workers, names, strict=True)]
    unsealed = [held.alloc(NUM_EACH) for held in workers]
    cached = filled(workers[0], "d", NUM_EACH)
    workers[0].release(cached)
    lose(large)
    moment = large.moment()
    assert {block for block, _ in moment.quarantine} == {ref.block for refs in unsealed for ref in refs}
    assert moment.counts.cached == 4 * NUM_EACH, "sealed blocks wait under their hashes"
    rejoin(*workers[::order])
    for held, *tables in zip(workers, sealed, unsealed, strict=True):
        assert set(held.holder.holdings()) == {ref for refs in tables for ref in refs}
        assert not held.fallbacks.counts.get("block lost in a rebuild")
    after = large.check()
    assert after.counts.cached == NUM_EACH and after.counts.quarantine == 0
    assert after.counts.sealed == 3 * NUM_EACH and after.counts.reserved == 3 * NUM_EACH
    for name in (*names, "d"):
        assert indexed(large.ledger, [chain(name, NUM_EACH)[:CHUNK]]) == CHUNK
    for held, *tables in zip(workers, sealed, unsealed, strict=True):
        held.release_many(tables)
        held.assert_idle()
    counts = large.check().counts
    assert counts.free + counts.cached == counts.total


def test_one_of_several_writers_dies_before_it_asserts(large: TestStore) -> None:
    living, dead = large.held("living"), large.held("dead")
    tables = [filled(living, "a", NUM_EACH), living.alloc(NUM_EACH)]
    filled(dead, "b", NUM_EACH)
    dead.alloc(NUM_EACH)
    lose(large)
    rejoin(living)
    assert large.moment().counts.quarantine == NUM_EACH, "the dead one's, which nobody knows to be dead"
    dead.writer_slot.close()
    report = large.ledger.reap()
    report = large.ledger.reap([slot for slot in report.waiting_slots if not large.arena.is_writer_alive(slot)])
    while report.more:
        report = large.ledger.reap([slot for slot in report.waiting_slots if not large.arena.is_writer_alive(slot)])
    counts = large.check().counts
    assert counts.quarantine == 0 and counts.cached == NUM_EACH
    assert set(living.holder.holdings()) == {ref for refs in tables for ref in refs}
    living.release_many(tables)
    living.assert_idle()


def test_a_writer_enters_the_header_between_the_new_count_and_the_census(
    large: TestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer may write. It raises the generations before it can see the new count, so the census must
    include it.
    """
    held, take_census, written = large.held(), rebuilding.take_census, list[BlockRef]()
    refs = held.holder.alloc(CHUNK)

    def entered(arena: object) -> rebuilding.Census:
        large.arena.raise_generations(refs, held.writer_slot.number)
        written.extend(refs)
        return take_census(large.arena)

    monkeypatch.setattr(rebuilding, "take_census", entered)
    lose(large)
    moment = large.moment()
    assert {block for block, _ in moment.quarantine} == {ref.block for ref in written}
    assert all(moment.blocks[ref.block].state is BlockState.QUARANTINE for ref in written)
