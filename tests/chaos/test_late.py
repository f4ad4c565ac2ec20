"""Counts of the calls that a holder makes after its lease has expired, whether they are refused or not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from block_store.errors import Fenced
from block_store.ledger.codec import SealItem
from block_store.ledger.lua_library import source, with_library
from block_store.ledger.scripts import LedgerScripts
from block_store.redis import redis_server
from testing.chaos.late import EFFECTIVE, HARMLESS, REFUSED, counted, late_calls
from testing.ledger.store import TestStore, chain


@pytest.fixture
def store() -> Iterator[TestStore]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="ll-test-") as directory:
        redis = redis_server.connect(None, directory)
        made = TestStore(redis.client, Path(directory) / "arena")
        count(made.ledger)
        yield made
        made.close()
        redis.close()


def count(ledger: LedgerScripts, right: str = "", wrong: str = "") -> None:
    """Makes the scripts of `ledger` count. Replaces `right` with `wrong` in the script of `release`."""
    for name in ledger._scripts:
        script = source(name).replace(right, wrong) if name == "release" and right else source(name)
        ledger._scripts[name] = ledger.client.register_script(with_library(counted(name, script)))


def test_every_call_of_a_fenced_holder_is_counted_and_none_before(store: TestStore) -> None:
    caller, ledger = store.caller(), store.ledger
    refs = store.fill(caller, chain("a", 2))
    more = ledger.alloc(caller.lane(), 1)
    assert not late_calls(ledger)
    store.expire(caller.epoch)
    ledger.reap()
    for late in (
        lambda: ledger.beat(caller.epoch),
        lambda: ledger.alloc(caller.lane(), 1),
        lambda: ledger.seal(caller.lane(), [SealItem(more[0])]),
        lambda: ledger.hand_over(caller.lane(), refs),
        lambda: ledger.acquire(caller.lane(), [chain("a", 2)]),
    ):
        with pytest.raises(Fenced):
            late()
    ledger.release(caller.lane(), refs)
    ledger.unregister(caller.epoch)
    operations = ("beat", "alloc", "seal", "hand_over", "acquire")
    expected = {(caller.epoch, name, REFUSED): 1 for name in operations}
    expected |= {(caller.epoch, name, HARMLESS): 1 for name in ("release", "unregister")}
    assert late_calls(ledger) == expected


def test_a_hole_in_the_fence_shows(store: TestStore) -> None:
    caller = store.caller()
    refs = store.fill(caller, chain("a", 2))
    count(
        store.ledger,
        "if early == '-FENCED' then return '+0' end\nif early then",
        "if early ~= '-FENCED' and early then",
    )
    store.client.zrem(store.ledger.tag + "leases", str(caller.epoch))  # fenced, but its blocks are not released yet
    with suppress(Fenced):
        store.ledger.release(caller.lane(), refs)
    assert late_calls(store.ledger) == {(caller.epoch, "release", EFFECTIVE): 1}
