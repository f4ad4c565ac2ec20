"""fsck finds each kind of difference, which a rebuild repairs, and no differences in a running store."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

import pytest

from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.block_record import RECORD
from block_store.ledger.codec import SealItem
from block_store.ledger.rebuild import rebuild
from block_store.server.fsck import Findings, fsck
from common.types import BlockRef
from testing.ledger.store import TestStore, chain, content


def filled(held: HeldBlocks, name: str, n: int) -> list[BlockRef]:
    refs, hashes = held.alloc(n), chain(name, n)
    for ref, prefix_hash in zip(refs, hashes, strict=True):
        held.arena.data[ref.block] = content(prefix_hash)
    return held.seal([SealItem(*pair) for pair in zip(refs, hashes, strict=True)])


def look(store: TestStore, *workers: HeldBlocks) -> Findings:
    """Runs fsck. Sends the workers' heartbeats itself instead of waiting for their threads."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            for held in workers:
                held.holder.lease.probe()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        return fsck(store.arena, store.ledger, digests=True, wait_s=10)
    finally:
        stop.set()
        thread.join()


DAMAGE: dict[str, Callable[[TestStore, HeldBlocks, BlockRef], object]] = {
    "I4: sides differ": lambda s, h, ref: s.client.zrem(s.ledger.tag + f"own:{h.epoch}", str(ref.block)),
    "the header has generation": lambda s, h, ref: s.client.setrange(
        s.ledger.tag + "blocks", ref.block * RECORD.size + 8, struct.pack("<Q", ref.generation + 1)
    ),
    "the header says WRITING": lambda s, h, ref: s.arena.states.__setitem__(ref.block, 1),
    "the header has hash": lambda s, h, ref: s.arena.hashes.__setitem__(ref.block, 7),
    "its bytes have changed since it was sealed": lambda s, h, ref: s.arena.data.__setitem__((ref.block, 3), 77),
    "worker believes that it holds": lambda s, h, ref: s.ledger.release(_next_lane(h), [ref]),
    "worker does not know that it holds": lambda s, h, ref: h._counts.pop(ref),
}  # fmt: skip


def _next_lane(held: HeldBlocks):  # type: ignore[no-untyped-def]
    from block_store.ledger.scripts import CallId

    held.holder.lane.number += 1
    return CallId(held.epoch, held.holder.lane.number)


@pytest.mark.parametrize("what", DAMAGE)
def test_a_difference_is_found(store: TestStore, what: str) -> None:
    held, other = store.held(reserve=2), store.held()
    refs = filled(held, "a", 2)
    assert look(store, held, other) == Findings((), ())
    DAMAGE[what](store, held, refs[0])
    found = look(store, held, other)
    assert any(what in difference for difference in found.differences) and not found.silent, found


def test_a_header_ahead_of_a_free_block(store: TestStore) -> None:
    store.arena.generations[5] = 9 << 32
    [difference] = look(store).differences
    assert difference.startswith("block 5 (FREE): the header is ahead")


def test_who_does_not_report_is_named(store: TestStore) -> None:
    held = store.held()
    held.alloc(1)
    assert fsck(store.arena, store.ledger, wait_s=0.0).silent == ("worker",)


def test_a_rebuild_repairs(store: TestStore) -> None:
    held = store.held(reserve=2)
    refs = filled(held, "a", 3)
    DAMAGE["I4: sides differ"](store, held, refs[0])
    DAMAGE["the header has generation"](store, held, refs[1])
    store.ledger.distrust()
    store.ledger = store.ledger.under(rebuild(store.client, store.arena))
    held.holder.lease.probe()
    assert look(store, held) == Findings((), ())
    held.release(refs)
    held.assert_idle()
