"""Random operations of several holders on the ledger. All invariants hold after every step, and deliberate bugs are
found.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from block_store.errors import LedgerError
from block_store.ledger.lua_library import source as lua
from block_store.ledger.lua_library import with_library
from block_store.redis.redis_server import RedisHandle
from testing.ledger.random_walk import LedgerWalk
from testing.ledger.store import TestStore
from tests.model_check import SHARDS, explore

NUMBER = st.integers(0, 30)
FLOORS = {
    "alloc": 100, "seal": 60, "acquire": 60, "hit": 40, "dedup": 10, "hand_over": 40, "claim": 30, "release": 60,
    "deliver": 30, "keep": 30, "reap": 20, "ticket_reap": 5, "zombie": 20, "unquarantine": 5, "stale": 15,
    "late": 10, "gap": 20, "rebuild": 20, "older": 20, "assert": 60,
}  # fmt: skip
"""The minimum number of successes of each operation in the whole run. A machine that rarely reaches deep states finds
no bugs.
"""


def make_machine(redis: RedisHandle, successes: Counter[str]) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.store = TestStore(redis.client, Path(tempfile.mkdtemp(dir="/dev/shm", prefix="ll-test-")))
            self.walk = LedgerWalk(self.store, successes)

        @rule(who=NUMBER, n=NUMBER)
        def alloc(self, who: int, n: int) -> None:
            self.walk.alloc(who, n)

        @rule(who=NUMBER, n=NUMBER, which=NUMBER)
        def alloc_and_seal(self, who: int, n: int, which: int) -> None:
            self.walk.alloc(who, n)
            self.walk.seal(who, which, n)

        @rule(who=NUMBER, to=NUMBER, n=NUMBER, which=NUMBER)
        def prefill_and_decode(self, who: int, to: int, n: int, which: int) -> None:
            self.walk.release(who, 5, True)
            self.walk.release(who, 5, False)
            self.walk.acquire(who, which, n)
            self.walk.alloc(who, n)
            self.walk.seal(who, which, n)
            self.walk.hand_over(who, n, which)
            if n % 2:
                self.walk.keep(0)
            if to % 3:
                self.walk.claim(to, 0)
            else:
                self.walk.ticket_dies(0)

        @rule(who=NUMBER, which=NUMBER, n=NUMBER)
        def seal(self, who: int, which: int, n: int) -> None:
            self.walk.seal(who, which, n)

        @rule(who=NUMBER, which=NUMBER, n=NUMBER)
        def deliver(self, who: int, which: int, n: int) -> None:
            self.walk.alloc(who, n)
            self.walk.deliver(who, which, n)

        @rule(who=NUMBER, which=NUMBER, n=NUMBER)
        def acquire(self, who: int, which: int, n: int) -> None:
            self.walk.acquire(who, which, n)

        @rule(who=NUMBER, n=NUMBER, keep=NUMBER)
        def hand_over(self, who: int, n: int, keep: int) -> None:
            self.walk.hand_over(who, n, keep)
            self.walk.hand_over_unsealed(who)

        @rule(who=NUMBER, which=NUMBER)
        def claim(self, who: int, which: int) -> None:
            self.walk.claim(who, which)

        @rule(which=NUMBER)
        def keep(self, which: int) -> None:
            self.walk.keep(which)

        @rule(who=NUMBER, n=NUMBER, unsealed=st.booleans())
        def release(self, who: int, n: int, unsealed: bool) -> None:
            self.walk.release(who, n, unsealed)

        @rule(who=NUMBER, n=NUMBER)
        def die(self, who: int, n: int) -> None:
            self.walk.release(who, 5, True)
            self.walk.alloc(who, n)
            self.walk.die(who)
            self.walk.zombie()
            if n % 2:
                self.walk.revive()

        @rule(which=NUMBER)
        def ticket_dies(self, which: int) -> None:
            self.walk.ticket_dies(which)

        @rule()
        def revive(self) -> None:
            self.walk.revive()

        @rule(who=NUMBER)
        def late(self, who: int) -> None:
            self.walk.late(who)

        @rule(who=NUMBER, how=NUMBER)
        def lose_redis(self, who: int, how: int) -> None:
            if how % 3 == 0:
                self.walk.gap()
            elif how % 3 == 1:
                self.walk.flushed()
            else:
                self.walk.older(who)

        @rule(who=NUMBER)
        def stale(self, who: int) -> None:
            self.walk.stale(who)

        def teardown(self) -> None:
            try:
                self.walk.finish()
            finally:  # cleans up even if the walk fails
                self.store.close()
                shutil.rmtree(self.store.arena.directory)

    return Machine


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_operations_keep_the_invariants(redis_handle: RedisHandle, shard: int) -> None:
    successes: Counter[str] = Counter()
    explore(make_machine(redis_handle, successes), successes, FLOORS, shard, examples=60, steps=30)


def random_walk(store: TestStore, seed: int, steps: int) -> None:
    walk, draw = LedgerWalk(store, Counter()), random.Random(seed)
    weights = {
        "alloc": 4, "seal": 6, "acquire": 3, "hand_over": 3, "deliver": 3, "unsealed": 1, "claim": 2, "keep": 1,
        "release": 3, "stale": 1, "die": 1, "ticket_dies": 1, "revive": 2, "late": 2, "gap": 1, "flushed": 1,
        "older": 1,
    }  # fmt: skip
    for name in draw.choices([*weights], [*weights.values()], k=steps):
        one_step(walk, name, *(draw.randrange(31) for _ in range(3)))
    walk.finish()


def one_step(walk: LedgerWalk, name: str, a: int, b: int, c: int) -> None:
    match name:
        case "alloc":
            walk.alloc(a, b)
        case "seal":
            walk.seal(a, b, c)
        case "deliver":
            walk.deliver(a, b, c)
        case "acquire":
            walk.acquire(a, b, c)
        case "hand_over":
            walk.hand_over(a, b, c)
        case "unsealed":
            walk.hand_over_unsealed(a)
        case "claim":
            walk.claim(a, b)
        case "keep":
            walk.keep(a)
        case "release":
            walk.release(a, b, c % 4 == 0)
        case "stale":
            walk.stale(a)
        case "die":
            walk.die(a)
            walk.zombie()
        case "ticket_dies":
            walk.ticket_dies(a)
        case "revive":
            walk.revive()
        case "late":
            walk.late(a)
        case "gap":
            walk.gap()
        case "flushed":
            walk.flushed()
        case "older":
            walk.older(a)


Edit = tuple[str, str, str]
"""A bug: (operation, text in its script, replacement)."""

NAMED: dict[str, list[Edit]] = {
    "acquire without fence": [("acquire", "return '-FENCED'", "return")],
    "eviction order not updated": [("release", "send('ZADD', CACHED_SET, order)", "")],
    "torn write not quarantined": [("reap", "state == RESERVED and reaped", "false")],
    "alloc not idempotent": [("alloc", "answer(epoch, number, table.concat(reply))", "table.concat(reply)")],
    "seal without generation": [
        ("seal", "string.sub(record, 9, 24) == string.sub(packed, at + 4, at + 11) .. epoch8",
         "string.sub(record, 17, 24) == epoch8"),
    ],
    "no dataset generation": [("alloc", "call('HGET', META, 'dataset') ~= ARGV[1]", "false")],
    "hand-over to the dead": [
        ("claim", "if not live(epoch) then return '-FENCED' end", ""), ("claim", "tonumber(last[1])", "(last[1] or 0)"),
    ],
    "hand-over of unsealed blocks": [("hand_over", "state_of(record) ~= SEALED", "false")],
    "hand-over not idempotent": [("hand_over", "answer(epoch, number, '+' .. ticket ..", "('+' .. ticket ..")],
    "reaping one side only": [("reap", "send('HDEL', REFS, gone)", "")],
    "evicted block left in the index": [("alloc", "send('HDEL', INDEX, evicted)", "")],
    "eviction ignoring references": [("release", "if rest ~= '' then", "if false then")],
    "generation not bumped": [("alloc", "low = low + 1", "low = low")],
    "duplicate's eviction drops the indexed block": [
        ("seal", "= indexed[i], i\n      records[i] = in_state(record, SEALED, 0)",
         "= indexed[i], i\n      records[i] = string.sub(in_state(record, SEALED, 1), 1, 24) .. hash"),
        ("alloc", "if block == blocks[i] then", "if true then"),
    ],
    "old snapshot accepted": [("beat", "< tonumber(ARGV[4])", "< 0")],
    "reap after a gap": [("reap", "last > now or now - last > gap_ms", "false")],
    "a late release overtakes an acquire": [("release", "if tonumber(number) < tonumber(last[1])", "if false")],
}  # fmt: skip
"""The bugs of issue 5 that can be detected from Redis alone. `test_actors` has the other four."""

MORE: dict[str, list[Edit]] = {
    "alloc without others' floors": [("alloc", "- floors_of_others(epoch)", "")],
    "alloc forgets the holder side": [("alloc", "add_own(epoch, blocks, ticks(n))", "")],
    "seal by another writer": [("seal", "string.sub(record, 9, 24) ==", "true or string.sub(record, 9, 24) ==")],
    "seal overwrites the index": [("seal", "= hmget(INDEX, hashes), {}", "= {}, {}")],
    "seal of twins indexes both": [("seal", "elseif here[hash] then", "elseif false then")],
    "sealed count forgotten": [("seal", "call('HINCRBY', META, 'sealed', n)", "")],
    "acquire leaves the block cached": [("acquire", "leave_cache(warm, warm_records)", "")],
    "acquire twice": [("acquire", "if not holds(side, epoch8) then", "if true then")],
    "hand-over of old generations": [("hand_over", "generation_of(record) ~= generations[i]", "false")],
    "hand-over forgets the block side": [("hand_over", "send('HSET', REFS, new_sides)", "")],
    "hand-over forgets the holder side": [("hand_over", "add_own(ticket, blocks, ticks(#blocks))", "")],
    "a quota is no bound": [("release", "local coldest = n > 0 and", "local coldest = false and")],
    "a quota of one block more": [("release", "call('ZCARD', key) - ", "call('ZCARD', key) - 1 - ")],
    "what is beyond a quota stays in the index": [("release", "unindex(surplus, surplus_records)", "")],
    "what is beyond a quota stays cached": [("release", "send('ZREM', CACHED_SET, surplus)", "")],
    "what is beyond a quota is lost": [("release", "send('LPUSH', FREE_LIST, surplus)", "")],
    "an eviction leaves the owner's list": [("alloc", "send('ZREM', cached_key(owner), owned)", "")],
    "an acquire leaves the owner's list": [("acquire", "send('ZREM', cached_key(owner), owned)", "")],
    "seal forgets the owner": [("seal", "struct.pack('<I2', owner)", "struct.pack('<I2', 0)")],
    "claim without the secret": [("claim", "is_ticket(ticket, secret)", "live(ticket)")],
    "keep without the secret": [("keep", "is_ticket(ticket, secret)", "live(ticket)")],
    "keep of blocks that the ticket lacks": [("keep", "not own[i] or ", "")],
    "keep of old generations": [("keep", " or generation_of(records[i]) ~= generations[i]", "")],
    "delivery without the secret": [("deliver", "is_ticket(ticket, secret)", "live(ticket)")],
    "delivery leaves the holder side": [("deliver", "send('ZREM', own_key(epoch), blocks)", "")],
    "delivery forgets the block side": [("deliver", "send('HSET', REFS, sides)", "")],
    "delivery keeps the holder's own copy": [("deliver", "let_go(epoch, doubles, false)", "")],
    "claim leaves the ticket alive": [("claim", "call('ZREM', LEASES, ticket)", "")],
    "claim forgets the block side": [("claim", "send('HSET', REFS, new_sides)", "")],
    "release of old generations": [("release", "and generation_of(records[i]) == generations[i]", "")],
    "release forgets the holder side": [("release", "send('ZREM', own_key(epoch), given_up)", "")],
    "reap leaves the lease": [("reap", "call('ZREM', LEASES, epoch)\n", "\n")],
    "reap forgets whom it has begun with": [("reap", "call('ZADD', DYING, reaped and 1 or 0, epoch)", "")],
    "every slot is freed": [
        ("reap", "'ZRANGEBYSCORE', QUARANTINE_SET, slot, slot, 'LIMIT', 0, room", "'ZRANGE', QUARANTINE_SET, 0, -1")
    ],
    "an assertion leaves the block in quarantine": [("assert_held", "send('ZREM', QUARANTINE_SET, taken)", "")],
    "an assertion frees nothing": [("assert_all", "unquarantine(slot, MOST)", "")],
    "an assertion of any generation": [("assert_held", "generation_of(record) == generations[i]", "true")],
}
MUTANTS = {**NAMED, **MORE}


def found_after(redis: RedisHandle, directory: Path, mutant: list[Edit], walks: int) -> int | None:
    """Returns the number of the first walk that fails, or None. Each walk has a new store."""
    for seed in range(walks):
        store = TestStore(redis.client, directory / str(seed))
        sources = {operation: with_library(lua(operation)) for operation, _, _ in mutant}
        for operation, right, wrong in mutant:
            assert right in sources[operation], "the mutant does not apply any more"
            sources[operation] = sources[operation].replace(right, wrong)
        for operation, source in sources.items():
            store.ledger._scripts[operation] = redis.client.register_script(source)
        try:
            random_walk(store, seed, 60)
        except (AssertionError, LedgerError):
            return seed
        finally:
            store.close()
    return None


def test_without_a_bug_nothing_is_found(redis_handle: RedisHandle, shm: Path) -> None:
    assert found_after(redis_handle, shm, [], 8) is None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_found(redis_handle: RedisHandle, shm: Path, name: str) -> None:
    assert found_after(redis_handle, shm, MUTANTS[name], 40) is not None
