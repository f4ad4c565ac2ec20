"""The scanner detects damaged keys of the ledger, for each invariant."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from block_store.ledger import scripts
from block_store.ledger.block_record import RECORD, RECORDS
from block_store.ledger.inspection import BlockState
from block_store.ledger.invariants import changes, check
from common.types import BlockRef
from testing.ledger.store import Caller, TestStore, chain

Damage = Callable[[TestStore, Caller, list[BlockRef]], object]


def key(store: TestStore, name: str) -> str:
    return store.ledger.tag + name


DAMAGE: dict[str, Damage] = {
    "I1: counts": lambda s, c, refs: s.client.hincrby(key(s, "meta"), "sealed", 1),
    "I1: the list of FREE": lambda s, c, refs: s.client.lpush(key(s, "free"), refs[0].block),
    "I1: counts ": lambda s, c, refs: s.client.setrange(
        key(s, "blocks"), refs[0].block * RECORD.size, chr(BlockState.CACHED)
    ),
    "I4: sides differ": lambda s, c, refs: s.client.zrem(key(s, f"own:{c.epoch}"), str(refs[0].block)),
    "I4: block": lambda s, c, refs: s.client.hset(
        key(s, "refs"), str(refs[0].block), struct.pack("<QQ", c.epoch, c.epoch)
    ),
    "I5: block": lambda s, c, refs: s.client.zrem(key(s, "leases"), str(c.epoch)),
    "I5: keys of": lambda s, c, refs: s.client.hset(key(s, "holder:99"), "kind", "worker"),
    "I5: floors": lambda s, c, refs: s.client.hset(key(s, "floors"), "99", 1),
    "I5: leases": lambda s, c, refs: s.client.zadd(key(s, "leases"), {"99": 1e15}),
    "I6: the index": lambda s, c, refs: s.client.hset(key(s, "index"), chain("z", 1)[0], refs[0].block),
    "I6: block": lambda s, c, refs: s.client.hdel(key(s, "index"), chain("a", 1)[0]),
}


@pytest.mark.parametrize("finding", DAMAGE)
def test_damage_is_found(store: TestStore, finding: str) -> None:
    caller = store.caller()
    refs = store.fill(caller, chain("a", 2))
    store.ledger.alloc(caller.lane(), 2)
    assert check(store.ledger) == []
    DAMAGE[finding](store, caller, refs)
    assert any(found.startswith(finding.strip()) for found in check(store.ledger)), check(store.ledger)


def test_a_generation_that_changes_under_a_reference_is_found(store: TestStore) -> None:
    caller = store.caller()
    refs = store.fill(caller, chain("a", 1))
    before = store.moment()
    for generation, finding in ((refs[0].generation + 1, "I3"), (refs[0].generation - 1, "I11")):
        at = refs[0].block * RECORD.size + 8
        store.client.setrange(key(store, "blocks"), at, struct.pack("<Q", generation))
        assert any(found.startswith(finding) for found in changes(before, store.moment()))


def test_the_scripts_read_records_of_the_size_that_python_writes() -> None:
    text = (Path(scripts.__file__).parent / "lua" / "lib" / "state.lua").read_text()
    assert f"local RECORD = {RECORD.size}\n" in text and RECORDS.itemsize == RECORD.size
