"""A claim without an answer may or may not have taken effect. Afterwards, each block is held at most once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from block_store.errors import Fenced, Gone, LedgerUnavailable
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.lane import Attempt
from block_store.ledger.rebuild import rebuild
from block_store.ledger.scripts import CHUNK, LedgerScripts
from common.ticket import Ticket
from common.types import BlockRef
from testing.ledger.lossy_redis import LossyRedis
from testing.ledger.store import TestStore, chain, content

HAPPENED = pytest.mark.parametrize("lost", [0, 1], ids=["not made", "made, unheard"])


class Unheard:
    """A state in which prefill has handed over `refs`, and decode's claim has got no answer."""

    def __init__(self, store: TestStore, num_blocks: int, lost: int) -> None:
        self.store, self.prefill, self.line = store, store.held("prefill"), LossyRedis(store.client)
        ledger = LedgerScripts(self.line, store.arena.arena_id, store.ledger.dataset)
        slot = store.arena.acquire_writer_slot()
        holder = LedgerClient.register(ledger, "decode", writer_slot=slot.number, beat_s=None, budget_s=-1.0)
        self.decode = HeldBlocks(holder, store.arena, slot)
        self.refs = self.fill("a", num_blocks)
        self.ticket = self.hand_over()
        self.attempt = Attempt()
        self.line.lose(lost, cut=True)
        with pytest.raises(LedgerUnavailable):
            self.decode.claim(self.ticket, self.attempt)
        assert self.decode.num_held == 0

    def fill(self, name: str, num_blocks: int) -> list[BlockRef]:
        refs, hashes = self.prefill.alloc(num_blocks), chain(name, num_blocks)
        for ref, prefix_hash in zip(refs, hashes, strict=True):
            self.store.arena.data[ref.block] = content(prefix_hash)
        return self.prefill.seal([SealItem(*pair) for pair in zip(refs, hashes, strict=True)])

    def hand_over(self) -> Ticket:
        tables = ((tuple(self.refs),),)
        return Ticket(self.store.arena.arena_id, self.prefill.hand_over(tables), tables, (16,))

    def heal(self) -> None:
        self.line.heal()
        self.decode.holder.lease.probe()

    def expire_ticket(self) -> None:
        if self.store.client.zscore(self.store.ledger.tag + "leases", str(self.ticket.id.epoch)) is not None:
            self.store.expire(self.ticket.id.epoch)
        self.store.ledger.reap()

    def check_nothing_is_held(self) -> None:
        for held in (self.prefill, self.decode):
            held.assert_idle()
        counts = self.store.check().counts
        assert counts.cached == len(self.refs) and counts.free + counts.cached == counts.total, counts


Make = Callable[..., Unheard]


@pytest.fixture
def unheard(store: TestStore) -> Make:
    return lambda lost: Unheard(store, 3, lost)


@HAPPENED
def test_it_is_claimed_again(unheard: Make, lost: int) -> None:
    scene = unheard(lost)
    scene.heal()
    assert scene.decode.alloc(1), "other calls may come in between"
    assert scene.decode.claim(scene.ticket, scene.attempt) == scene.ticket.tables
    assert scene.decode.num_held == 4 and set(scene.refs) <= set(scene.decode.holder.holdings())
    with pytest.raises(Gone):
        scene.decode.claim(scene.ticket)
    assert scene.decode.num_held == 4, "once"
    scene.decode.release(scene.decode.holder.holdings())
    scene.check_nothing_is_held()


@HAPPENED
@pytest.mark.parametrize("silent", [False, True], ids=["then it answers", "still silent"])
def test_it_is_declined(unheard: Make, lost: int, silent: bool) -> None:
    scene = unheard(lost)
    if not silent:
        scene.heal()
    scene.decode.decline(scene.ticket, scene.attempt)
    scene.heal()
    scene.decode.release(scene.decode.alloc(1))
    assert not set(scene.refs) & set(scene.decode.holder.holdings())
    if silent:
        scene.expire_ticket()
    scene.check_nothing_is_held()
    with pytest.raises(Gone):
        scene.decode.claim(scene.ticket)


@HAPPENED
def test_it_is_declined_and_the_same_blocks_come_with_another_ticket(unheard: Make, lost: int) -> None:
    """The references of the abandoned claim are released, but not those that a sequence uses."""
    scene = unheard(lost)
    scene.decode.decline(scene.ticket, scene.attempt)
    assert scene.prefill.acquire([chain("a", 3)]) == [scene.refs]
    other = scene.hand_over()
    scene.heal()
    scene.decode.claim(other)
    assert scene.decode.num_held == 3 and set(scene.decode.holder.holdings()) == set(scene.refs)
    scene.decode.release(scene.refs)
    scene.expire_ticket()
    scene.check_nothing_is_held()


@HAPPENED
def test_the_ticket_ends_meanwhile(unheard: Make, lost: int) -> None:
    scene = unheard(lost)
    scene.expire_ticket()
    scene.heal()
    if lost:  # the claim took effect in time
        scene.decode.claim(scene.ticket, scene.attempt)
        scene.decode.release(scene.refs)
    else:
        with pytest.raises(Gone):
            scene.decode.claim(scene.ticket, scene.attempt)
        assert scene.decode.num_held == 0
    scene.check_nothing_is_held()


@HAPPENED
def test_the_worker_is_fenced_meanwhile(unheard: Make, lost: int) -> None:
    scene = unheard(lost)
    scene.store.expire(scene.decode.epoch)
    scene.store.ledger.reap()
    scene.line.heal()
    with pytest.raises(Fenced):
        scene.decode.holder.lease.probe()
    for call in (scene.decode.claim, scene.decode.decline):
        with pytest.raises(Fenced):
            call(scene.ticket, scene.attempt)
    scene.decode.close()
    scene.expire_ticket()
    scene.prefill.assert_idle()
    assert scene.store.check().counts.cached == 3


@HAPPENED
def test_the_ledger_is_built_anew_meanwhile(unheard: Make, lost: int) -> None:
    scene = unheard(lost)
    scene.store.ledger.forget()
    scene.store.ledger = scene.store.ledger.under(rebuild(scene.store.client, scene.store.arena))
    scene.prefill.holder.lease.probe()
    scene.heal()
    with pytest.raises(Gone):
        scene.decode.claim(scene.ticket, scene.attempt)
    scene.check_nothing_is_held()


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_a_claim_of_several_calls_whose_answers_are_lost(store: TestStore, shm: Path, lost: int) -> None:
    large = TestStore(store.client, shm / "large", num_blocks=3 * CHUNK)
    scene = Unheard(large, 2 * CHUNK + 5, lost)
    scene.heal()
    assert scene.decode.claim(scene.ticket, scene.attempt) == scene.ticket.tables
    assert scene.decode.num_held == len(scene.refs) and set(scene.decode.holder.holdings()) == set(scene.refs)
    large.check()
    scene.decode.release(scene.refs)
    scene.check_nothing_is_held()
    large.close()
