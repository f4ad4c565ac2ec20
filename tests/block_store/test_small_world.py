"""Two holders, two blocks, two hashes: everything that can happen within a number of moves (with `make model-check`, in
any number).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from block_store.ledger.lua_library import source, with_library
from block_store.redis.redis_server import RedisHandle
from testing.ledger.exhaustive import NUM_BLOCKS, SmallWorld
from testing.ledger.store import TestStore

DEPTH = int(os.environ.get("MODEL_CHECK_DEPTH", "4"))
MOVES = {"alloc 1", "alloc 2", "acquire a", "acquire ab", "seal", "release", "hand over", "claim", "die", "come back"}


def test_every_state_keeps_the_invariants(redis_handle: RedisHandle, shm: Path) -> None:
    store = TestStore(redis_handle.client, shm, NUM_BLOCKS)
    world = SmallWorld(store)
    num_states = world.explore(DEPTH)
    print(f"{num_states} states, {sum(world.moves.values())} moves: {world.moves}")
    assert num_states > 100 and world.moves.keys() > MOVES
    store.close()


@pytest.mark.parametrize(
    ("operation", "right", "wrong"),
    [
        ("reap", "state == RESERVED and reaped", "false and reaped"),
        ("alloc", "send('HDEL', INDEX, evicted)", ""),
        ("claim", "call('ZREM', LEASES, ticket)", ""),
    ],
)
def test_a_seeded_bug_is_found(redis_handle: RedisHandle, shm: Path, operation: str, right: str, wrong: str) -> None:
    store = TestStore(redis_handle.client, shm, NUM_BLOCKS)
    code = with_library(source(operation))
    assert right in code
    store.ledger._scripts[operation] = redis_handle.client.register_script(code.replace(right, wrong))
    with pytest.raises(AssertionError):
        SmallWorld(store).explore(6)
    store.close()
