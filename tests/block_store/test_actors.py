"""Workers that are suspended at any point and resumed later. No wrong bytes are read, but without any one of the rules,
the search finds wrong bytes.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from block_store.redis.redis_server import RedisHandle
from testing.ledger.store import TestStore
from testing.ledger.worker_programs import Rules, World

SCALE = int(os.environ.get("MODEL_CHECK_SCALE", "1"))
NUM_BLOCKS = 4
STEPS = 100
FLOORS = {
    "acquired": 60, "entered": 50, "stored": 40, "compared again": 30, "sealed": 25, "rebuild": 5, "starts over": 10,
    "stale read found": 1,
}  # fmt: skip
BROKEN = {
    "header raised after the store": "enter_before_store",
    "two readings compared with each other": "compare_with_table",
    "quarantine by time alone": "quarantine_by_lock",
    "seal before the second comparison": "compare_before_seal",
}


def walk(redis: RedisHandle, directory: Path, rules: Rules, seed: int, successes: Counter[str]) -> None:
    store = TestStore(redis.client, directory / str(seed), NUM_BLOCKS)
    try:
        world, draw = World(store, rules, successes), random.Random(seed)
        for _ in range(STEPS):
            world.act(draw.randrange)
    finally:
        store.close()


def test_the_rules_keep_what_is_read(redis_handle: RedisHandle, shm: Path) -> None:
    successes: Counter[str] = Counter()
    for seed in range(12 * SCALE):
        walk(redis_handle, shm, Rules(), seed, successes)
    short = {name: (successes[name], floor) for name, floor in FLOORS.items() if successes[name] < floor * SCALE}
    assert not short, f"(done, wanted): {short}"


@pytest.mark.parametrize("bug", BROKEN)
def test_a_broken_rule_is_found(redis_handle: RedisHandle, shm: Path, bug: str) -> None:
    rules = replace(Rules(), **{BROKEN[bug]: False})
    for seed in range(60 * SCALE):
        try:
            walk(redis_handle, shm, rules, seed, Counter())
        except AssertionError as found:
            assert "I7" in str(found)
            return
    raise AssertionError(f"{bug}: not found")
