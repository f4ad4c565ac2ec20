"""Each operation and each refusal of the ledger. `test_machine` has random combinations."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest

from block_store import errors
from block_store.ledger.codec import SealItem
from block_store.ledger.inspection import BlockState
from block_store.ledger.rebuild import rebuild
from block_store.ledger.scripts import CHUNK, CallId, chunks
from block_store.redis.redis_server import RedisHandle
from common.ticket import TicketId
from common.types import BlockRef, CacheQuota, Epoch
from testing.ledger.store import TestStore, chain, indexed


def test_alloc_takes_free_blocks_then_the_coldest_cached(store: TestStore) -> None:
    me, ledger = store.caller(), store.ledger
    old, new = store.fill(me, chain("old", 4)), store.fill(me, chain("new", 4))
    ledger.release(me.lane(), old)
    ledger.release(me.lane(), new)
    free = ledger.alloc(me.lane(), 4)
    assert not {ref.block for ref in free} & {ref.block for ref in old + new}
    # The chain that was released first is evicted first, beginning with its tail.
    order = [ledger.alloc(me.lane(), 1)[0].block for _ in range(8)]
    assert order == [ref.block for ref in [*reversed(old), *reversed(new)]]
    assert indexed(ledger, [chain("old", 4)]) == indexed(ledger, [chain("new", 4)]) == 0
    store.check()


def test_a_shortened_chain_still_hits(store: TestStore) -> None:
    me, ledger = store.caller(), store.ledger
    refs = store.fill(me, chain("a", 6))
    ledger.release(me.lane(), refs)
    ledger.alloc(me.lane(), 6 + 2)
    assert indexed(ledger, [chain("a", 6)]) == 4
    assert ledger.acquire(me.lane(), [chain("a", 6)]) == [refs[:4]]


def test_reaped_chains_too_are_evicted_tail_first(store: TestStore) -> None:
    dead, me = store.caller(), store.caller()
    refs = store.fill(dead, chain("a", 5))
    store.expire(dead.epoch)
    store.ledger.reap()
    assert store.moment().cached == tuple(ref.block for ref in reversed(refs))
    store.ledger.alloc(me.lane(), 7 + 3)
    assert indexed(store.ledger, [chain("a", 5)]) == 2


def test_hashes_that_differ_in_one_bit_are_two_blocks(store: TestStore) -> None:
    me, ledger = store.caller(), store.ledger
    hashes = [bytes(32 - 1 - at // 8) + bytes([1 << at % 8]) + bytes(at // 8) for at in (0, 7, 8, 127, 128, 247, 255)]
    refs = store.fill(me, hashes)
    assert len(set(refs)) == len(hashes)
    for prefix_hash, ref in zip(hashes, refs, strict=True):
        assert ledger.acquire(me.lane(), [[prefix_hash]]) == [[ref]]
    assert indexed(ledger, [[bytes(32)]]) == 0
    store.check()


def test_a_tenants_coldest_blocks_leave_the_cache_at_its_quota(store: TestStore) -> None:
    """The quota is 25 % of 12 blocks. Three blocks stay: the head of the chain that was used last. Blocks of other
    tenants stay.
    """
    me, ledger, quota = store.caller(), store.ledger, CacheQuota(b"t" * 32, 25)
    other = store.fill(me, chain("other", 4))
    ledger.release(me.lane(), other)
    for name in "ab":
        refs = store.fill(me, chain(name, 4), quota)
        ledger.release(me.lane(), refs)
        now = store.check()
        assert (now.counts.free, now.counts.cached) == (5, 7)
        assert now.owned == {1: tuple(ref.block for ref in reversed(refs[:3]))}
    assert [indexed(ledger, [chain(name, 4)]) for name in ("other", "a", "b")] == [4, 0, 3]
    held = ledger.acquire(me.lane(), [chain("b", 3)])[0]
    assert store.check().owned == {1: ()}
    more = store.fill(me, chain("c", 4), quota)
    assert store.check().counts.sealed == 7, "what is in use counts for no quota"
    ledger.release(me.lane(), [*held, *more])
    assert store.check().counts.cached == 7


def test_a_quota_that_has_changed_counts_from_the_next_blocks_on(store: TestStore) -> None:
    me, ledger, tenant = store.caller(), store.ledger, b"t" * 32
    for percent, name, cached in ((50, "a", 4), (50, "b", 6), (0, "c", 0), (100, "d", 4)):
        refs = store.fill(me, chain(name, 4), CacheQuota(tenant, percent))
        ledger.release(me.lane(), refs)
        assert store.check().counts.cached == cached, percent


def test_blocks_of_a_ledger_built_anew_count_for_nobody(store: TestStore) -> None:
    me, quota = store.caller(), CacheQuota(b"t" * 32, 25)
    store.fill(me, chain("a", 3), quota)
    store.ledger = store.ledger.under(rebuild(store.client, store.arena, grace_s=0))
    now = store.check()
    assert now.counts.cached == 3 and now.owned == {} and {block.owner for block in now.blocks} == {0}


def test_seal_of_a_known_hash_gives_the_other_block(store: TestStore) -> None:
    one, two, ledger = store.caller(), store.caller(), store.ledger
    first = store.fill(one, chain("a", 2))
    own = ledger.alloc(two.lane(), 3)
    store.write(two, own, [*chain("a", 2), None])
    items = [SealItem(ref, prefix_hash) for ref, prefix_hash in zip(own, [*chain("a", 2), None], strict=True)]
    assert ledger.seal(two.lane(), items) == [*first, own[2]]
    assert set(ledger.holdings(two.epoch)) == {*first, *own}
    ledger.release(two.lane(), own)
    blocks = store.moment().blocks
    assert [blocks[ref.block].state for ref in own] == [BlockState.FREE] * 3, "no hash of their own: not cached"
    assert blocks[first[0].block].holders == (one.epoch, two.epoch)
    store.check()


def test_seal_is_all_or_nothing_and_for_the_writer_only(store: TestStore) -> None:
    one, two, ledger = store.caller(), store.caller(), store.ledger
    mine, other = ledger.alloc(one.lane(), 2), ledger.alloc(two.lane(), 1)
    before = store.moment()
    bad = [
        [SealItem(mine[0]), SealItem(other[0])],
        [SealItem(mine[0]), SealItem(BlockRef(mine[1].block, mine[1].generation + 1))],
        [SealItem(mine[0]), SealItem(mine[0])],
        [SealItem(BlockRef(999, 1))],
    ]
    for items in bad:
        with pytest.raises(errors.Stale):
            ledger.seal(one.lane(), items)
    assert store.moment() == before
    ledger.seal(one.lane(), [SealItem(mine[0])])
    with pytest.raises(errors.Stale):
        ledger.seal(one.lane(), [SealItem(mine[0])])


def test_acquire_needs_every_group(store: TestStore) -> None:
    me, ledger = store.caller(), store.ledger
    full, window = chain("full", 3), chain("window", 3)
    refs = store.fill(me, [*full, *window[:2]])
    assert ledger.acquire(me.lane(), [full, window]) == [refs[:2], refs[3:5]]
    assert indexed(ledger, [full, window]) == 2
    assert ledger.acquire(me.lane(), [full, chain("none", 1)]) == [[], []]
    assert ledger.acquire(me.lane(), []) == []
    store.check()


def test_hand_over_moves_and_keeps(store: TestStore) -> None:
    one, two, ledger = store.caller(), store.caller(), store.ledger
    refs = store.fill(one, chain("a", 4))
    ticket = ledger.hand_over(one.lane(), refs)
    ledger.release(one.lane(), refs[1:])
    assert ledger.holdings(one.epoch) == refs[:1]
    assert sorted(ledger.holdings(ticket.epoch)) == sorted(refs)
    assert ledger.claim(two.lane(), ticket) == (refs, False)
    with pytest.raises(errors.Gone):
        ledger.claim(one.lane(), ticket)
    with pytest.raises(errors.Gone):
        ledger.claim(one.lane(), TicketId(two.epoch, b""))
    assert set(ledger.holdings(two.epoch)) == set(refs)
    store.check()


def test_a_ticket_is_claimed_by_who_was_given_its_secret(store: TestStore) -> None:
    """The epoch of a ticket is easy to guess. A caller that guesses it gets nothing, and takes nothing from the
    claimer.
    """
    one, two, thief, ledger = store.caller(), store.caller(), store.caller(), store.ledger
    first, second = store.fill(one, chain("a", 2)), store.fill(one, chain("b", 2))
    ticket, other = ledger.hand_over(one.lane(), first), ledger.hand_over(one.lane(), second)
    assert other.epoch == ticket.epoch + 1 and len(ticket.secret) == 16 and ticket.secret != other.secret
    for guess in (b"", bytes(16), ticket.secret[:-1], ticket.secret + b"\0", other.secret):
        with pytest.raises(errors.Gone):
            ledger.claim(thief.lane(), TicketId(ticket.epoch, guess))
    assert ledger.holdings(thief.epoch) == []
    assert ledger.claim(two.lane(), ticket) == (first, False)
    assert ticket.secret.hex() not in repr(ticket) and repr(ticket.secret) not in repr(ticket)
    store.check()


def test_a_repeated_hand_over_gives_the_first_secret(store: TestStore) -> None:
    one, two, ledger = store.caller(), store.caller(), store.ledger
    refs, lane = store.fill(one, chain("a", 2)), one.lane()
    ticket = ledger.hand_over(lane, refs)
    assert ledger.hand_over(lane, refs) == ticket
    assert ledger.claim(two.lane(), ticket) == (refs, False)


def test_hand_over_refusals(store: TestStore) -> None:
    one, two, ledger = store.caller(), store.caller(), store.ledger
    sealed, writing = store.fill(one, chain("a", 2)), ledger.alloc(one.lane(), 1)
    theirs = store.fill(two, chain("b", 1))
    before = store.moment()
    for refs, refusal in (
        ([*sealed, *writing], errors.Stale),
        ([*sealed, *theirs], errors.NotHolder),
        ([sealed[0], sealed[0]], errors.NotHolder),
        ([BlockRef(sealed[0].block, sealed[0].generation - 1)], errors.Stale),
    ):
        with pytest.raises(refusal):
            ledger.hand_over(one.lane(), refs)
    assert store.moment() == before


def test_a_ticket_expires_and_its_blocks_stay_cached(store: TestStore) -> None:
    one, ledger = store.caller(), store.ledger
    refs = store.fill(one, chain("a", 3))
    ticket = ledger.hand_over(one.lane(), refs, lease_s=0.0)
    ledger.release(one.lane(), refs)
    assert ledger.reap().reaped == (ticket.epoch,)
    with pytest.raises(errors.Gone):
        ledger.claim(one.lane(), ticket)
    assert store.moment().counts.cached == 3 and indexed(ledger, [chain("a", 3)]) == 3


def test_floors_are_kept_free_for_others(store: TestStore) -> None:
    floor, other, ledger = store.caller(floor=5), store.caller(), store.ledger
    with pytest.raises(errors.Exhausted) as refusal:
        ledger.alloc(other.lane(), 8)
    assert (refusal.value.wanted, refusal.value.available) == (8, 7)
    ledger.alloc(other.lane(), 7)
    with pytest.raises(errors.Exhausted):
        ledger.alloc(other.lane(), 1)
    ledger.alloc(floor.lane(), 5)
    with pytest.raises(errors.FloorsExceedArena, match="need 13 blocks, but the arena has 12"):
        ledger.register("more", writer_slot=9, floor=8)
    ledger.unregister(floor.epoch)
    ledger.register("more", writer_slot=9, floor=8)


def test_acquire_does_not_eat_into_floors_either(store: TestStore) -> None:
    one, ledger = store.caller(), store.ledger
    refs = store.fill(one, chain("a", 12))
    ledger.release(one.lane(), refs)
    floor = store.caller(floor=5)
    assert len(ledger.acquire(one.lane(), [chain("a", 12)])[0]) == 7
    assert len(ledger.alloc(floor.lane(), 5)) == 5
    store.check()


def test_generation_is_rebuild_count_and_counter(store: TestStore) -> None:
    me = store.caller()
    seen: set[BlockRef] = set()
    for i in range(1, 4):
        refs = store.ledger.alloc(me.lane(), 12)
        assert {ref.generation for ref in refs} == {(1 << 32) + i} and not seen & set(refs)
        seen |= set(refs)
        store.ledger.release(me.lane(), refs)


def test_every_call_carries_the_dataset(store: TestStore) -> None:
    me, ledger = store.caller(), store.ledger
    refs = store.fill(me, chain("a", 2))
    ticket = ledger.hand_over(me.lane(), refs)
    old = copy.copy(ledger)
    old.dataset = "f" * 16
    before, lane, hashes = store.moment(), CallId(me.epoch, 99), [chain("a", 2)]
    for call in (
        lambda: old.register("x", writer_slot=1), lambda: old.beat(me.epoch), lambda: old.alloc(lane, 1),
        lambda: old.seal(lane, [SealItem(refs[0])]), lambda: old.acquire(lane, hashes),
        lambda: old.hand_over(lane, refs), lambda: old.claim(lane, ticket), lambda: old.release(lane, refs),
        lambda: old.unregister(me.epoch), lambda: old.holdings(me.epoch), lambda: indexed(old, hashes), old.reap,
        lambda: old.inspect_raw(), lambda: old.give_up(ticket), lambda: old.holds(me.epoch, refs),
        lambda: old.assert_all(lane), lambda: old.assert_held(lane, refs), lambda: old.report(me.epoch, "c", refs, []),
    ):  # fmt: skip
        with pytest.raises(errors.StaleDataset):
            call()
    assert store.moment() == before


def test_a_repeated_register_is_once_and_a_lower_number_is_refused(store: TestStore) -> None:
    ledger = store.ledger
    assert ledger.register("w", writer_slot=1, token="t") == ledger.register("w", writer_slot=1, token="t")
    epoch = ledger.register("w", writer_slot=1)
    ledger.alloc(CallId(epoch, 5), 1)
    with pytest.raises(errors.OutOfOrder):
        ledger.alloc(CallId(epoch, 4), 1)
    assert len(store.moment().holders) == 2


def test_a_reap_after_a_gap_renews_every_lease(store: TestStore) -> None:
    me, ledger = store.caller(), store.ledger
    for moment in (1, 10**15):  # long ago; in the future
        store.client.hset(ledger.tag + "meta", "last_reap", moment)
        store.expire(me.epoch)
        report = ledger.reap()
        assert report.postponed and not report.reaped
        assert 4000 < ledger_lease_ms(store, me.epoch) <= 5000
    store.expire(me.epoch)
    assert ledger.reap().reaped == (me.epoch,)


def test_leases_end_after_the_clock_was_set_back(store: TestStore) -> None:
    """All times that Redis has stored are ten minutes ahead."""
    me, ledger = store.caller(), store.ledger
    refs = store.fill(me, chain("a", 1))
    ticket = ledger.hand_over(me.lane(), refs)
    ahead = round(time.time() * 1000) + 600_000
    store.client.hset(ledger.tag + "meta", "last_reap", ahead)
    store.client.zadd(ledger.tag + "leases", {str(me.epoch): ahead + 5000, str(ticket.epoch): ahead + 8000})
    report = ledger.reap()
    assert report.postponed and not report.reaped
    for epoch in (me.epoch, ticket.epoch):
        assert 7000 < ledger_lease_ms(store, epoch) <= 8000
    store.expire(me.epoch)
    assert ledger.reap().reaped == (me.epoch,)
    store.check()


def test_a_reap_after_a_gap_shortens_no_lease(store: TestStore) -> None:
    me, ledger = store.caller(), store.ledger
    ledger.beat(me.epoch, 50.0)
    store.client.hset(ledger.tag + "meta", "last_reap", 1)
    assert ledger.reap().postponed
    assert ledger_lease_ms(store, me.epoch) > 40_000


def ledger_lease_ms(store: TestStore, epoch: Epoch) -> int:
    seconds, micros = store.client.time()  # type: ignore[misc]
    deadline = store.client.zscore(store.ledger.tag + "leases", str(epoch))
    return int(float(deadline)) - seconds * 1000 - micros // 1000  # type: ignore[arg-type]


def test_a_beat_never_shortens_a_lease(store: TestStore) -> None:
    me = store.caller()
    store.ledger.beat(me.epoch, 50.0)
    store.ledger.beat(me.epoch, 1.0)
    assert ledger_lease_ms(store, me.epoch) > 40_000


def test_a_ticket_is_built_and_claimed_in_pieces(redis_handle: RedisHandle, shm: Path) -> None:
    """One worker claims the ticket in any number of calls. Unclaimed references are released with the ticket."""
    size = 2 * CHUNK + 50
    store = TestStore(redis_handle.client, shm / "big", num_blocks=size + 500)
    me, you, thief, ledger, hashes = store.caller(), store.caller(), store.caller(), store.ledger, chain("a", size)
    refs = [ref for part in chunks(hashes) for ref in store.fill(me, part)]
    tickets = []
    for _ in range(2):
        ticket = None
        for part in chunks(refs):
            ticket = ledger.hand_over(me.lane(), part, ticket=ticket)
        assert ticket is not None
        tickets.append(ticket)
    first, second = tickets
    assert ledger.holdings(first.epoch) == refs
    assert ledger.claim(you.lane(), first) == (refs[:CHUNK], True)
    with pytest.raises(errors.Gone):
        ledger.claim(thief.lane(), first)
    assert ledger.claim(you.lane(), first) == (refs[CHUNK : 2 * CHUNK], True)
    assert ledger.claim(you.last, first) == (refs[CHUNK : 2 * CHUNK], True), "repeated"
    assert ledger.claim(you.lane(), first) == (refs[2 * CHUNK :], False)
    with pytest.raises(errors.Gone):
        ledger.claim(you.lane(), first)
    assert ledger.holdings(you.epoch) == refs and indexed(ledger, [hashes]) == size
    assert ledger.claim(thief.lane(), second)[1]
    ledger.give_up(TicketId(second.epoch, b"a guess"))
    store.check()
    ledger.give_up(second)
    while ledger.reap(gap_s=60).more:
        store.check()
    assert len(ledger.holdings(thief.epoch)) == CHUNK
    with pytest.raises(errors.Gone):
        ledger.hand_over(me.lane(), refs[:1], ticket=second)
    store.check()
    with pytest.raises(ValueError, match=f"limit of {CHUNK}"):
        ledger.alloc(you.lane(), CHUNK + 1)
    with pytest.raises(errors.Exhausted) as refusal:
        ledger.alloc(you.lane(), CHUNK, wanted=501)
    assert (refusal.value.wanted, refusal.value.available) == (501, 500)
    store.close()


def test_the_dead_are_let_go_of_piece_by_piece(redis_handle: RedisHandle, shm: Path) -> None:
    """There are holders with many blocks, many holders, and many blocks that wait for a dead process. No sweep handles
    all of them.
    """
    store = TestStore(redis_handle.client, shm / "big", num_blocks=2000)
    ledger, rich = store.ledger, store.caller()
    poor = [store.caller() for _ in range(70)]
    sealed = [ref for part in chunks(chain("a", 600)) for ref in store.fill(rich, part)]
    for _ in range(3):
        ledger.alloc(rich.lane(), 200)
    for one in poor:
        ledger.alloc(one.lane(), 1)
    store.expire(*(one.epoch for one in [rich, *poor]))
    reaped: list[Epoch] = []
    num_sweeps = 0
    while (report := ledger.reap(gap_s=60)).more:
        reaped += report.reaped
        num_sweeps += 1
        store.check()
    assert num_sweeps >= 1200 // CHUNK and set(reaped) == {one.epoch for one in [rich, *poor]}
    assert store.moment().counts.cached == len(sealed) and store.moment().counts.quarantine == 670
    freed = 0
    while (report := ledger.reap([rich.slot.number, *(one.slot.number for one in poor)], gap_s=60)).more:
        freed += report.num_unquarantined
        store.check()
    assert freed + report.num_unquarantined == 670 and store.moment().counts.quarantine == 0
    store.close()
