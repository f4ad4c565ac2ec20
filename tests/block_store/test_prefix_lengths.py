"""The call that finds a prompt's cached prefix in many arenas."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import redis

from block_store.errors import LedgerUnavailable
from block_store.ledger.prefix_lengths import MOST_ARENAS, PrefixLengths
from block_store.ledger.rebuild import rebuild
from block_store.ledger.scripts import LedgerScripts
from block_store.redis.redis_server import RedisHandle
from testing.ledger.store import TestStore, chain


@pytest.fixture
def stores(redis_handle: RedisHandle, shm: Path) -> list[TestStore]:
    return [TestStore(redis_handle.client, shm / str(number), 16) for number in range(4)]


def test_each_arena_answers_for_itself(stores: list[TestStore]) -> None:
    hashes = chain("a", 9)
    for store, length in zip(stores, (0, 1, 8, 9), strict=True):
        store.fill(store.caller(), hashes[:length])
    ledgers = [store.ledger for store in stores]
    lengths = PrefixLengths(stores[0].client)
    for asked in range(10):
        assert lengths.find(ledgers, hashes[:asked]) == [min(asked, length) for length in (0, 1, 8, 9)]
    many = ledgers * MOST_ARENAS
    assert lengths.find(many, hashes) == [0, 1, 8, 9] * MOST_ARENAS


def test_a_prefix_whose_tail_was_evicted_is_found_to_its_end(stores: list[TestStore]) -> None:
    store, rng = stores[0], random.Random(3)
    me, hashes = store.caller(), chain("a", 12)
    refs = store.fill(me, hashes)
    store.ledger.release(me.lane(), refs)
    while rest := store.moment().cached:
        found = PrefixLengths(store.client).find([store.ledger], hashes)
        assert found == [len(rest)]
        store.ledger.alloc(me.lane(), min(rng.randint(1, 4) + 4 * (len(rest) == 12), len(rest)))


def test_a_rebuilt_and_a_damaged_ledger_answer_with_none_and_the_others_still_answer(stores: list[TestStore]) -> None:
    hashes = chain("a", 3)
    for store in stores:
        store.fill(store.caller(), hashes)
    ledgers = [store.ledger for store in stores]
    rebuild(stores[0].client, stores[0].arena)
    client = stores[0].client
    client.set(stores[1].ledger.tag + "meta", "not a hash")
    client.delete(stores[2].ledger.tag + "index")
    client.set(stores[2].ledger.tag + "index", "not a hash")
    assert PrefixLengths(client).find(ledgers, hashes) == [None, None, None, 3]
    for store in stores[1:3]:
        client.delete(store.ledger.tag + "meta", store.ledger.tag + "index")


def test_a_server_that_does_not_answer_is_named() -> None:
    client = redis.Redis(port=1)
    with pytest.raises(LedgerUnavailable, match="prefix_lengths"):
        PrefixLengths(client).find([LedgerScripts(client, "x", "d")], [bytes(32)])
