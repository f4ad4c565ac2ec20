from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import NoReturn

import pytest

from block_store.errors import Exhausted, Fenced, Gone, LedgerDamaged, LedgerUnavailable, NotHolder, Stale, StaleDataset
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.breaker import BUDGET_S, PROBE_S
from block_store.ledger.codec import SealItem
from block_store.ledger.lane import Attempt
from block_store.ledger.scripts import CHUNK
from block_store.redis.redis_server import RedisHandle
from block_store.transfer.pulled_blocks import Delivery, Taken
from common.ticket import Ticket, TicketId
from common.types import BlockRef
from testing.ledger.store import TestStore, chain, content


def filled(held: HeldBlocks, name: str, n: int) -> list[BlockRef]:
    refs = held.alloc(n)
    for ref, prefix_hash in zip(refs, chain(name, n), strict=True):
        held.arena.data[ref.block] = content(prefix_hash)
    return held.seal([SealItem(*pair) for pair in zip(refs, chain(name, n), strict=True)])


def ticket_of(held: HeldBlocks, *branches: list[BlockRef]) -> Ticket:
    tables = tuple((tuple(table),) for table in branches)
    return Ticket(held.arena.arena_id, held.hand_over(tables), tables, (16,))


def test_the_last_sequence_releases(store: TestStore) -> None:
    held = store.held()
    refs = filled(held, "a", 3)
    held.share(refs)
    assert held.acquire([chain("a", 2)]) == [refs[:2]]
    held.release(refs)
    assert held.num_held == 3 and held.count(refs[0]) == 2 and held.count(refs[2]) == 1
    held.release_many([refs, refs[:2]])
    held.assert_idle()
    assert store.moment().counts.cached == 3
    with pytest.raises(NotHolder):
        held.release(refs[:1])
    with pytest.raises(NotHolder):
        held.share(refs[:1])


def test_blocks_are_ready_to_write(store: TestStore) -> None:
    held = store.held(reserve=4)
    refs = held.alloc(2)
    assert held.arena.check_refs(refs) and held.num_reserved == 4
    assert (held.arena.states == 1).sum() == 6, "the reserve too is in the header: a rebuild must see whose it is"
    assert {int(held.arena.writer_slots[ref.block]) for ref in refs} == {held.writer_slot.number}
    lane = held.holder.lane.number
    assert len(held.alloc(4)) == 4
    assert held.holder.lane.number == lane, "taken from the reserve without a call"
    held.top_up()
    assert held.num_reserved == 4 and held.num_free_hint >= 4
    held.alloc(6)
    with pytest.raises(Exhausted):
        held.alloc(1)
    assert held.num_held == 12
    held.close()
    assert store.moment().counts.free == 12


def test_nothing_comes_between_the_two_halves_of_a_rejoining(store: TestStore) -> None:
    """All operations that count blocks wait while the beat thread rejoins."""
    held, attempt = store.held(reserve=2), Attempt()
    [ref], ticket = filled(held, "a", 1), ticket_of(held, filled(held, "b", 1))
    calls: list[Callable[[], object]] = [
        lambda: held.alloc(1), lambda: held.acquire([chain("a", 1)]), lambda: held.seal([]), lambda: held.share([ref]),
        lambda: held.release([ref]), lambda: held.release_many([[ref]]), lambda: held.hand_over((([ref],),), attempt),
        lambda: held.claim(ticket), lambda: held.decline(ticket), lambda: held.forget(attempt), held.give_up_reserve,
        held.rejoining._everything,
    ]  # fmt: skip
    with ThreadPoolExecutor(len(calls)) as pool:
        with held.lock:
            waiting = [pool.submit(call) for call in calls]
            time.sleep(0.2)
            assert not any(call.done() for call in waiting)
        wait(waiting, 60)
    assert all(call.done() for call in waiting)


def test_reserve_shrinks_before_a_request_is_refused_and_can_be_given_up(store: TestStore) -> None:
    held, other = store.held(reserve=8), store.held()
    assert len(held.alloc(10)) == 10 and held.num_reserved == 0
    held.top_up()
    assert held.num_reserved == 0, "the target is not available"
    other.alloc(2)
    other.close()
    small = store.held(reserve=2)
    small.top_up()
    assert small.num_reserved == 2
    small.give_up_reserve()
    small.assert_idle()
    held.alloc(2)


def test_a_header_ahead_of_the_ledger_stops_the_writer(store: TestStore) -> None:
    held = store.held()
    store.arena.generations[0] = 9 << 32
    with pytest.raises(LedgerUnavailable):
        held.alloc(3)
    assert held.fallbacks.counts["rebuild asked for"] == 1
    with pytest.raises(StaleDataset):
        store.ledger.reap()


@pytest.mark.parametrize("call", ["alloc", "acquire"])
def test_a_late_holder_does_not_take_its_lateness_for_an_older_ledger(store: TestStore, call: str) -> None:
    """The holder was suspended between the ledger's answer and its check of the header. Others have its
    blocks by then.
    """
    held, name = store.held(), call
    filled(held, "a", 2)
    answer = getattr(held.holder, name)

    def stopped(*args: object) -> object:
        refs = answer(*args)
        store.expire(held.holder.epoch)
        store.ledger.reap()
        store.arena.generations[:] = 9 << 32
        return refs

    setattr(held.holder, name, stopped)
    with pytest.raises(Fenced):
        held.alloc(2) if call == "alloc" else held.acquire([chain("a", 2)])
    assert held.holder.fenced.is_set() and not held.holder.breaker.is_open
    assert "rebuild asked for" not in held.fallbacks.counts
    store.ledger.reap()  # still the same ledger


def test_seal_of_a_known_prefix_moves_the_count(store: TestStore) -> None:
    one, two = store.held(), store.held()
    first = filled(one, "a", 2)
    second = filled(two, "a", 2)
    assert second == first and two.num_held == 2
    two.release(second)
    two.assert_idle()
    again = filled(one, "a", 2)
    assert again == first and one.count(first[0]) == 2
    one.release_many([first, again])
    one.assert_idle()
    store.check()


def test_seal_keeps_its_own_block_if_the_indexed_one_has_been_reallocated(store: TestStore) -> None:
    """Otherwise the same prompt would get the stale block again and again, although every reader rejects it."""
    one, two = store.held(), store.held()
    first = filled(one, "a", 2)
    store.arena.generations[first[1].block] += 1
    second = filled(two, "a", 2)
    assert not {*first} & {*second} and two.arena.check_refs(second) and two.num_held == 2
    assert two.fallbacks.counts["rebuild asked for"] == 1
    with pytest.raises(StaleDataset):
        store.ledger.reap()


def test_a_delivery_that_finds_a_reallocated_block_leaves_no_block_counted(store: TestStore) -> None:
    """The second of three blocks has a double in the index, which the header contradicts. The third is not delivered
    any more.
    """
    one, two = store.held(), store.held()
    first = filled(one, "a", 1)
    hashes = chain("b", 1) + chain("a", 1) + chain("c", 1)
    names = [BlockRef(number, 1) for number in range(3)]
    taken: Taken[BlockRef] = Taken({}, dict(zip(names, two.alloc(3), strict=True)))
    items = [SealItem(ref, one) for ref, one in zip(taken.fresh.values(), hashes, strict=True)]
    source = Ticket("elsewhere", TicketId(two.epoch, b""), ((tuple(names),),), (48,))
    delivery = Delivery(two, source, taken, items)
    digests = store.arena.seal_digests([item.ref for item in items])
    store.arena.generations[first[0].block] += 1
    delivery.store(digests[:2])
    with pytest.raises(Stale, match="reallocated"):
        delivery.finish()
    assert two.num_held == 0


def test_seal_checks_the_header(store: TestStore) -> None:
    held = store.held()
    refs = held.alloc(1)
    store.arena.generations[refs[0].block] += 1
    with pytest.raises(Exception, match="was reallocated"):
        held.seal([SealItem(refs[0])])
    with pytest.raises(NotHolder):
        held.seal([SealItem(BlockRef(5, 5))])


def test_hand_over_of_two_branches_that_share_a_prompt(store: TestStore) -> None:
    prefill, decode = store.held(), store.held()
    prompt, tails = filled(prefill, "p", 2), prefill.alloc(2)
    prefill.seal([SealItem(tail) for tail in tails])
    prefill.share(prompt)
    ticket = ticket_of(prefill, [*prompt, tails[0]], [*prompt, tails[1]])
    prefill.assert_idle()
    assert decode.claim(ticket) == ticket.tables
    assert decode.count(prompt[0]) == 2 and decode.num_held == 4
    decode.release([*prompt, tails[0]])
    decode.release([*prompt, tails[1]])
    decode.assert_idle()
    with pytest.raises(Gone):
        decode.claim(ticket)


def test_hand_over_keeps_what_another_sequence_uses(store: TestStore) -> None:
    prefill, decode = store.held(), store.held()
    shared = filled(prefill, "p", 2)
    own = filled(prefill, "q", 1)
    prefill.share(shared)
    ticket = ticket_of(prefill, [*shared, *own])
    assert prefill.num_held == 2 and prefill.count(own[0]) == 0
    decode.claim(ticket)
    prefill.release(shared)
    prefill.assert_idle()
    assert (store.arena.data[shared[1].block] == content(chain("p", 2)[1])).all() and decode.num_held == 3
    store.check()


def test_a_refused_hand_over_changes_nothing(store: TestStore) -> None:
    held = store.held()
    refs = [*filled(held, "a", 1), *held.alloc(1)]
    with pytest.raises(Stale):
        held.hand_over([[refs]])
    assert held.num_held == 2
    with pytest.raises(NotHolder):
        held.hand_over([[refs[:1]], [refs[:1]]])
    assert held.count(refs[0]) == 1
    held.release(refs)
    held.assert_idle()


def test_a_declined_ticket_leaves_what_others_here_use(store: TestStore) -> None:
    prefill, decode = store.held(), store.held()
    refs = filled(prefill, "a", 2)
    prefill.share(refs[:1])
    running, refused = ticket_of(prefill, refs), ticket_of(prefill, refs[:1])
    decode.claim(running)
    decode.decline(refused)
    assert set(refs) <= set(decode.holder.holdings())
    decode.release(refs)
    decode.assert_idle()
    store.check()


def test_a_ticket_that_names_more_than_it_holds(store: TestStore) -> None:
    prefill, decode = store.held(), store.held()
    refs = filled(prefill, "a", 2)
    good = ticket_of(prefill, refs[:1])
    with pytest.raises(Stale):
        decode.claim(Ticket(good.arena_id, good.id, ((tuple(refs),),), (32,)))
    decode.assert_idle()
    with pytest.raises(ValueError, match="is for arena"):
        decode.claim(Ticket("0" * 16, good.id, (), ()))


def test_a_shared_head_is_evicted_after_every_tail(store: TestStore) -> None:
    held = store.held()
    head, one, two = filled(held, "h", 1), filled(held, "x", 1), filled(held, "y", 1)
    held.share(head)
    held.release_many([[*head, *one], [*head, *two]])
    assert store.moment().cached == (two[0].block, one[0].block, head[0].block)


def test_fenced_means_fenced(store: TestStore) -> None:
    held = store.held(reserve=2)
    refs = filled(held, "a", 2)
    store.expire(held.epoch)
    store.ledger.reap()
    with pytest.raises(Fenced):
        held.acquire([chain("a", 1)])
    before = store.moment()
    for call in (
        lambda: held.alloc(1), lambda: held.release(refs), lambda: held.share(refs), lambda: held.hand_over([[refs]]),
        lambda: held.seal([]), held.top_up,
    ):  # fmt: skip
        with pytest.raises(Fenced):
            call()
    assert store.moment() == before
    held.close()
    assert not store.arena.is_writer_alive(held.writer_slot.number)


def test_what_the_reserve_has_far_beyond_what_is_expected_goes_back(redis_handle: RedisHandle, shm: Path) -> None:
    big = TestStore(redis_handle.client, shm / "big", num_blocks=4808)
    held = big.held(reserve=10)
    for expected, reserved in ((601, 601), (172, 600), (100, 2 * 100 + CHUNK), (0, 2 * 10 + CHUNK), (5000, 601)):
        held.expect(expected)
        held.rejoining.settle_up()
        assert held.num_reserved == reserved, expected
        assert big.check().counts.reserved == reserved
    held.close()
    big.close()


def test_a_census_is_reported_to_once_it_is_heard_of(store: TestStore) -> None:
    held, other = store.held(), store.held()
    refs = filled(held, "a", 3)
    store.ledger.ask_all("c")
    held.holder.lease.beat()
    held.rejoining.settle_up()
    assert store.ledger.reports("c") == {held.epoch: ([], [])}
    held._counts.pop(refs[2])  # now only the ledger has this reference
    held.rejoining.settle_up()
    other.holder.lease.beat()
    other.rejoining.settle_up()
    assert store.ledger.reports("c") == {held.epoch: ([], refs[2:]), other.epoch: ([], [])}


def test_a_beat_that_is_not_answered_opens_the_breaker(store: TestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    held = store.held()

    def silent(*_: object) -> NoReturn:
        raise LedgerUnavailable("silence")

    with monkeypatch.context() as patched:
        patched.setattr(store.ledger, "beat", silent)
        held.holder.lease.probe()
    assert held.holder.breaker.is_open
    with pytest.raises(LedgerUnavailable):
        held.alloc(1)
    held.holder.lease.probe()
    assert not held.holder.breaker.is_open and held.alloc(1)


def test_both_sides_are_compared_once_after_an_unanswered_call(
    store: TestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = store.held()
    held._calls.is_unsure = True
    held.rejoining.settle_up()
    monkeypatch.setattr(store.ledger, "holdings_after", None)
    held.rejoining.settle_up()


@pytest.mark.parametrize("refusal", [Exhausted(13, 12), LedgerDamaged("a script failed")])
def test_a_call_that_was_answered_by_a_refusal_is_not_made_again(
    store: TestStore, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    held, calls = store.held(), list[int]()

    def refused(*_: object) -> NoReturn:
        calls.append(1)
        raise refusal

    monkeypatch.setattr(store.ledger, "alloc", refused)
    monkeypatch.setattr(store.ledger, "distrust", lambda *_: None)
    with pytest.raises((Exhausted, LedgerUnavailable)):
        held.alloc(13)
    held.holder.breaker.close()
    assert held.holder.seal([]) == [] and len(calls) == 1


def test_a_silent_redis_is_asked_again_with_pauses(store: TestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    held, calls = store.held(), list[int]()

    def silent(*_: object) -> NoReturn:
        calls.append(1)
        raise LedgerUnavailable("refused at once")

    monkeypatch.setattr(store.ledger, "alloc", silent)
    with pytest.raises(LedgerUnavailable):
        held.alloc(1)
    assert 1 < len(calls) <= BUDGET_S / 0.002 + 1


def test_between_two_beats_a_holder_counts_what_is_left(store: TestStore) -> None:
    held = store.held()
    held.holder.lease.beat()
    assert held.num_free_hint == 12
    refs = held.alloc(5)
    assert held.num_free_hint == 7
    held.release(refs[:2])
    assert held.num_free_hint == 9
    held.holder.lease.beat()
    assert held.num_free_hint == 9


def test_a_new_ledger_that_lets_nobody_in_is_tried_ever_more_rarely(store: TestStore) -> None:
    holder = store.held().holder
    pauses = [holder.lease._probe_pause_s]

    def refused() -> NoReturn:
        raise LedgerUnavailable("not yet")

    holder.lease.on_stale = refused
    for _ in range(5):
        holder.lease._rejoin()
        pauses.append(holder.lease._probe_pause_s)
    assert pauses == [PROBE_S, 2 * PROBE_S, 4 * PROBE_S, 8 * PROBE_S, 8 * PROBE_S, 8 * PROBE_S]
    holder.lease.on_stale = lambda: True
    holder.lease._rejoin()
    assert holder.lease._probe_pause_s == PROBE_S
