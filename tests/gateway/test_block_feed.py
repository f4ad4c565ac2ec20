"""Catalogs of cached blocks and their subscribers, over ledgers in a real Redis."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from block_store.errors import LedgerUnavailable
from block_store.ledger.prefix_hash import group_hash, hash_blocks, prompt_chain
from block_store.ledger.rebuild import open_ledger
from block_store.ledger.scripts import LedgerScripts
from block_store.redis.redis_server import RedisHandle, connect
from common.adapters import AdapterRef
from common.errors import ResourceExhausted, Unavailable
from common.kv_retention import KvRules, Retention
from common.types import SamplingParams, StoppingParams
from gateway.fleet import block_feed
from gateway.fleet.block_catalog import Arenas, BlockCatalog, Changes, TokenSequence
from gateway.fleet.block_feed import BlockFeed, Subscription, prefill_arenas
from gateway.intake.resolved_request import ResolvedRequest
from testing.gateway.parts import make_record
from testing.ledger.store import Caller, TestStore

DOMAIN = "ab" * 32
RULES = KvRules(16)
SALT = b"salt of acme"


def ids_of(start: int, num_tokens: int) -> list[int]:
    return list(range(start, start + num_tokens))


def hashes_of(ids: Sequence[int], salt: bytes = SALT, public_tokens: int = 0, domain: str = DOMAIN) -> list[bytes]:
    start, rekey = prompt_chain(bytes.fromhex(domain), salt, ids, public_tokens, 16)
    return list(hash_blocks(start, ids, 16, rekey=rekey))


@pytest.fixture
def store(redis_handle: RedisHandle, tmp_path: Path) -> Iterator[TestStore]:
    found = TestStore(redis_handle.client, tmp_path)
    yield found
    found.close()


def arenas(*stores: TestStore, rules: KvRules = RULES) -> Arenas:
    return Arenas(frozenset({(DOMAIN, rules)}), [store.ledger for store in stores])


def evict_all(store: TestStore, caller: Caller) -> None:
    """Allocates and releases every block, after which no block is cached."""
    refs = store.ledger.alloc(caller.lane(), store.arena.num_blocks)
    store.write(caller, refs, [None] * len(refs))
    store.ledger.release(caller.lane(), refs)


def sequence(ids: Sequence[int], public_tokens: int = 0) -> TokenSequence:
    return TokenSequence(ids, public_tokens)


def stored(changes: Changes) -> list[bytes]:
    return [block.prefix_hash for block in changes.stored]


def test_sealed_blocks_are_listed_with_parents_and_token_ids(store: TestStore) -> None:
    ids, catalog = ids_of(0, 70), BlockCatalog(SALT)
    hashes = hashes_of(ids)
    store.fill(store.caller(), hashes[:3])
    found = catalog.update([sequence(ids)], arenas(store))
    assert stored(found) == hashes[:3] and not found.cleared and not found.removed
    assert [block.parent for block in found.stored] == [None, *hashes[:2]]
    assert [list(block.token_ids) for block in found.stored] == [ids[:16], ids[16:32], ids[32:48]]
    assert catalog.update([], arenas(store)) == Changes()
    assert catalog.everything() == replace(found, cleared=True)


def test_a_block_without_its_parent_is_not_listed(store: TestStore) -> None:
    ids, catalog, caller = ids_of(0, 48), BlockCatalog(SALT), store.caller()
    hashes = hashes_of(ids)
    store.fill(caller, [hashes[0], hashes[2]])
    assert stored(catalog.update([sequence(ids)], arenas(store))) == hashes[:1]
    store.fill(caller, [hashes[1]])
    assert stored(catalog.update([sequence(ids)], arenas(store))) == hashes[1:]


def test_a_prefix_that_is_divided_between_arenas_is_not_listed_as_a_whole(
    store: TestStore, redis_handle: RedisHandle, tmp_path: Path
) -> None:
    ids, other = ids_of(0, 48), TestStore(redis_handle.client, tmp_path / "other")
    hashes = hashes_of(ids)
    store.fill(store.caller(), [hashes[0], hashes[2]])
    other.fill(other.caller(), hashes[:2])
    assert stored(BlockCatalog(SALT).update([sequence(ids)], arenas(store, other))) == hashes[:2]
    other.close()


def test_public_blocks_belong_to_the_chain_of_every_tenant(store: TestStore) -> None:
    ids, catalog = ids_of(0, 64), BlockCatalog(SALT)
    hashes = hashes_of(ids, public_tokens=40)
    assert hashes[:2] == hashes_of(ids, salt=b"another", public_tokens=40)[:2]
    store.fill(store.caller(), hashes)
    assert stored(catalog.update([sequence(ids, 40)], arenas(store))) == hashes


def test_evicted_blocks_are_removed_and_listed_again_when_they_are_computed_again(store: TestStore) -> None:
    ids, catalog, caller = ids_of(0, 48), BlockCatalog(SALT), store.caller()
    hashes = hashes_of(ids)
    refs = store.fill(caller, hashes)
    catalog.update([sequence(ids)], arenas(store))
    store.ledger.release(caller.lane(), refs)
    assert catalog.update([], arenas(store)) == Changes(), "they are still in the index"
    evict_all(store, caller)
    gone = catalog.update([], arenas(store))
    assert set(gone.removed) == set(hashes) and not gone.stored and not gone.cleared
    store.fill(caller, hashes)
    assert catalog.update([], arenas(store)) == Changes(), "the catalog has forgotten their token ids"
    assert stored(catalog.update([sequence(ids)], arenas(store))) == hashes


def test_the_least_recently_used_blocks_are_forgotten_tail_first(store: TestStore) -> None:
    first, second, catalog, caller = ids_of(0, 48), ids_of(100, 48), BlockCatalog(SALT, 4), store.caller()
    store.fill(caller, hashes_of(first) + hashes_of(second))
    assert len(catalog.update([sequence(first)], arenas(store)).stored) == 3
    after = catalog.update([sequence(second)], arenas(store))
    assert stored(after) == hashes_of(second) and set(after.removed) == set(hashes_of(first)[1:])
    long = ids_of(200, 160)
    store.fill(caller, hashes_of(long)[:5])
    after = catalog.update([sequence(long)], arenas(store))
    assert stored(after) == hashes_of(long)[:4] and len(after.removed) == 4
    assert len(catalog.everything().stored) == 4


def test_a_rebuilt_ledger_clears_and_its_blocks_are_listed_again(store: TestStore) -> None:
    ids, catalog = ids_of(0, 48), BlockCatalog(SALT)
    store.fill(store.caller(), hashes_of(ids))
    catalog.update([sequence(ids)], arenas(store))
    store.client.flushall()
    assert catalog.update([], arenas(store)) == Changes(cleared=True)
    assert catalog.update([], arenas(store)) == Changes(), "it is announced once"
    store.ledger = open_ledger(store.client, store.arena)
    assert stored(catalog.update([], arenas(store))) == hashes_of(ids)


def test_an_arena_that_is_replaced_clears(redis_handle: RedisHandle, tmp_path: Path) -> None:
    stores = [TestStore(redis_handle.client, tmp_path / name) for name in ("a", "b", "c")]
    ids, catalog = ids_of(0, 48), BlockCatalog(SALT)
    hashes = hashes_of(ids)
    for each, number in zip(stores, (1, 2, 3), strict=True):
        each.fill(each.caller(), hashes[:number])
    assert stored(catalog.update([sequence(ids)], arenas(*stores[:2]))) == hashes[:2], "in any of the arenas"
    after = catalog.update([], arenas(stores[0]))
    assert after.cleared and stored(after) == hashes[:1]
    after = catalog.update([sequence(ids)], arenas(stores[0], stores[2]))
    assert not after.cleared and stored(after) == hashes[1:]
    assert catalog.update([], arenas()) == Changes(cleared=True)
    assert stored(catalog.update([], arenas(stores[2]))) == hashes, "candidates wait for an arena"
    for each in stores:
        each.close()


def test_a_silent_redis_has_no_blocks_until_it_answers(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        handle = connect(None, directory)
        store = TestStore(handle.client, tmp_path)
        ids, catalog = ids_of(0, 48), BlockCatalog(SALT)
        store.fill(store.caller(), hashes_of(ids))
        catalog.update([sequence(ids)], arenas(store))
        assert handle.process is not None
        handle.process.send_signal(signal.SIGSTOP)
        try:
            silent = catalog.update([], arenas(store))
        finally:
            handle.process.send_signal(signal.SIGCONT)
        assert set(silent.removed) == set(hashes_of(ids)) and not silent.cleared
        while (again := catalog.update([], arenas(store))) == Changes():  # it may take a while to wake up
            pass
        assert stored(again) == hashes_of(ids)
        store.close()
        handle.close()


def test_a_damaged_index_is_read_again_although_the_ledger_has_not_changed(store: TestStore) -> None:
    ids, catalog, index = ids_of(0, 48), BlockCatalog(SALT), store.ledger.tag + "index"
    store.fill(store.caller(), hashes_of(ids))
    catalog.update([sequence(ids)], arenas(store))
    store.client.rename(index, index + "-kept")
    store.client.set(index, "damage")
    assert len(catalog.update([sequence(ids)], arenas(store)).removed) == 3
    store.client.rename(index + "-kept", index)
    assert stored(catalog.update([], arenas(store))) == hashes_of(ids)


def test_only_groups_that_keep_all_positions_count(store: TestStore) -> None:
    ids, caller = ids_of(0, 32), store.caller()
    hashes = hashes_of(ids)
    mixed = KvRules(16, (Retention(32), Retention()))
    store.fill(caller, hashes)
    assert not BlockCatalog(SALT).update([sequence(ids)], arenas(store, rules=mixed)).stored
    store.fill(caller, [group_hash(hashes[0], 1)])
    assert stored(BlockCatalog(SALT).update([sequence(ids)], arenas(store, rules=mixed))) == hashes[:1]
    sliding = KvRules(16, (Retention(32),))
    assert BlockCatalog(SALT).update([sequence(ids)], arenas(store, rules=sliding)) == Changes()


def test_the_arenas_are_those_of_prefill_workers(store: TestStore) -> None:
    kept = make_record("prefill", "p0", arena_id="a", hash_domain=DOMAIN)
    others = [
        replace(kept, worker_id="p1", arena_id="b", draining=True, hash_domain="cd"),
        replace(kept, worker_id="d0", arena_id="c", role="decode", hash_domain="ef"),
        replace(kept, worker_id="p2", arena_id="unknown"),
    ]
    found = prefill_arenas([kept, *others], dict.fromkeys("abc", store.ledger))
    assert found == Arenas(frozenset({(DOMAIN, kept.kv_rules)}), [store.ledger], is_complete=False)
    assert prefill_arenas([kept], dict.fromkeys("abc", store.ledger)).is_complete


def test_blocks_of_an_arena_that_is_missing_for_a_while_are_listed_again(
    store: TestStore, redis_handle: RedisHandle, tmp_path: Path
) -> None:
    ids, catalog, other = ids_of(0, 48), BlockCatalog(SALT), TestStore(redis_handle.client, tmp_path / "other")
    store.fill(store.caller(), hashes_of(ids))
    assert len(catalog.update([sequence(ids)], arenas(store, other)).stored) == 3
    without = catalog.update([], replace(arenas(other), is_complete=False))
    assert without.cleared and not without.stored
    assert stored(catalog.update([], arenas(store, other))) == hashes_of(ids)
    other.close()


def test_blocks_are_removed_if_redis_falls_silent_between_two_calls(
    store: TestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> NoReturn:
        raise LedgerUnavailable("silent")

    ids, catalog = ids_of(0, 48), BlockCatalog(SALT)
    store.fill(store.caller(), hashes_of(ids))
    monkeypatch.setattr(LedgerScripts, "clock", silent)
    assert len(catalog.update([sequence(ids)], arenas(store)).stored) == 3
    monkeypatch.setattr(LedgerScripts, "present", silent)
    assert len(catalog.update([], arenas(store)).removed) == 3


# --- subscribers


def request(ids: list[int], tenant: str = "acme", salt: bytes = SALT) -> ResolvedRequest:
    return ResolvedRequest("r", ids, SamplingParams(), StoppingParams(), 1.0, tenant=tenant, salt=salt)


def feed_of(store: TestStore) -> BlockFeed:
    return BlockFeed(lambda: arenas(store), lambda tenant: f"salt of {tenant}".encode())


async def next_of(subscription: Subscription) -> Changes:
    changes = await asyncio.wait_for(subscription.next(), 60)
    assert changes is not None
    return changes


async def test_a_subscriber_gets_everything_first_and_then_the_changes(store: TestStore) -> None:
    feed, caller, first, second = feed_of(store), store.caller(), ids_of(0, 32), ids_of(100, 32)
    store.fill(caller, hashes_of(first) + hashes_of(second))
    feed.computed(request(first), [()])
    with feed.subscribe("acme") as early:
        assert await next_of(early) == Changes(cleared=True), "nothing is recorded while nobody subscribes"
        feed.computed(request(first[:20]), [first[20:]])
        assert stored(await next_of(early)) == hashes_of(first)
        with feed.subscribe("acme") as late:
            everything = await next_of(late)
            assert everything.cleared and stored(everything) == hashes_of(first)
            feed.computed(request(second), [()])
            assert stored(await next_of(early)) == stored(await next_of(late)) == hashes_of(second)
    with feed.subscribe("acme") as again:
        assert await next_of(again) == Changes(cleared=True), "the blocks were forgotten with the last subscriber"


async def test_requests_of_others_with_a_salt_or_an_adapter_are_ignored(store: TestStore) -> None:
    feed, caller, ids = feed_of(store), store.caller(), ids_of(0, 32)
    of_zoo = b"salt of zoo"
    store.fill(caller, hashes_of(ids) + hashes_of(ids, salt=of_zoo) + hashes_of(ids, salt=b"narrow"))
    with feed.subscribe("acme") as acme, feed.subscribe("zoo") as zoo:
        assert await next_of(acme) == await next_of(zoo) == Changes(cleared=True)
        feed.computed(request(ids, salt=b"narrow"), [()])
        feed.computed(replace(request(ids), adapter=AdapterRef("poet", "/poet", "ab" * 32)), [()])
        feed.computed(request(ids, tenant="bulk", salt=b"salt of bulk"), [()])
        feed.computed(request(ids, tenant="zoo", salt=of_zoo), [()])
        assert stored(await next_of(zoo)) == hashes_of(ids, salt=of_zoo)
        feed.computed(request(ids_of(0, 16)), [()])
        assert stored(await next_of(acme)) == hashes_of(ids)[:1], "the first blocks that acme hears of"


async def test_a_subscriber_that_does_not_read_gets_everything_later(
    store: TestStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks come and go while nobody reads. What waits stays bounded, and ends in the current list."""
    monkeypatch.setattr(block_feed, "MOST_BLOCKS", 8)
    feed, caller, ids = feed_of(store), store.caller(), ids_of(0, 48)
    with feed.subscribe("acme") as slow, feed.subscribe("acme") as fast:
        assert (await next_of(slow)).cleared and (await next_of(fast)).cleared
        for _ in range(5):
            refs = store.fill(caller, hashes_of(ids))
            feed.computed(request(ids), [()])
            assert stored(await next_of(fast)) == hashes_of(ids)
            store.ledger.release(caller.lane(), refs)
            evict_all(store, caller)
            assert len((await next_of(fast)).removed) == 3
            assert sum(changes.size for changes in slow.waiting) <= 8
        store.fill(caller, hashes_of(ids[:32]))
        feed.computed(request(ids[:32]), [()])
        await next_of(fast)
        known: list[bytes] = []
        while known != hashes_of(ids[:32]):
            changes = await next_of(slow)
            known = [] if changes.cleared else [each for each in known if each not in changes.removed]
            known += stored(changes)


async def test_what_waits_for_an_update_is_bounded(store: TestStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_feed, "MOST_WAITING_TOKENS", 80)
    feed, caller, asked = feed_of(store), store.caller(), [ids_of(start, 32) for start in (0, 100, 200)]
    store.fill(caller, [each for ids in asked for each in hashes_of(ids)])
    with feed.subscribe("acme") as subscription:
        await next_of(subscription)
        for ids in asked:
            feed.computed(request(ids), [()])
        assert set(stored(await next_of(subscription))) == {*hashes_of(asked[1]), *hashes_of(asked[2])}


async def test_the_number_of_subscribers_is_bounded_and_a_closed_feed_ends(store: TestStore) -> None:
    feed = feed_of(store)
    with ExitStack() as stack:
        for tenant in "ab":
            last = [stack.enter_context(feed.subscribe(tenant)) for _ in range(block_feed.MOST_OF_A_TENANT)][-1]
            with pytest.raises(ResourceExhausted, match="per tenant"), feed.subscribe(tenant):
                pass
        with pytest.raises(ResourceExhausted, match="at once"), feed.subscribe("e"):
            pass
        await next_of(last)
        feed.close()
        assert await last.next() is None
        with pytest.raises(Unavailable), feed.subscribe("e"):
            pass
