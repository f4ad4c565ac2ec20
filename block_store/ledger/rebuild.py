"""Builds the ledger of an arena in Redis from the arena's header: the first ledger, and a new ledger after each loss or
damage (docs/design.md, Ledger: rebuild).

Sealed full blocks are indexed again, one for each hash. Blocks that a living process may be writing wait for its writer
slot. If any writer is alive, sealed blocks that the index does not name (partial blocks and duplicates) wait until a
holder asserts them, all writers have asserted their blocks, or the grace period ends. All other blocks are free.
Workers then register again and assert their blocks (`Rejoining.rejoin`), so that their requests continue.

The order of steps ensures that no block is allocated twice and that no worker writes into another worker's block. A
writer first records its generation, slot and state in the header and then reads the rebuild count. It writes into the
block only if the count is still that of its ledger. The rebuild first raises the count and then reads the header. In
the writer and in the rebuild, a full fence separates the two steps. Either the rebuild sees the writer, and the block
waits for its slot, or the writer sees the new count and writes nothing. Generations of the new ledger have the count as
their upper half, so they are higher than every generation in the header.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import redis

from block_store.arena import atomics
from block_store.arena.arena import Arena
from block_store.arena.header import HeaderState
from block_store.errors import LedgerUnavailable, StaleDataset
from block_store.ledger.block_record import RECORDS
from block_store.ledger.inspection import BlockState
from block_store.ledger.lua_library import source
from block_store.ledger.scripts import LEASE_S, LedgerScripts, server_run_id

_LOG = logging.getLogger(__name__)
_CHUNK = 1024
"""Number of blocks per command."""


@dataclass(frozen=True, slots=True)
class Census:
    """The block records of a new ledger, derived from the header, and the writer slots to wait for."""

    records: npt.NDArray[np.void]
    awaited: tuple[int, ...]
    """Writer slots that were locked when the header was read."""

    def blocks(self, state: BlockState) -> npt.NDArray[np.int64]:
        """Returns the numbers of the blocks in `state`, ascending."""
        return np.flatnonzero(self.records["state"] == state)


def open_ledger(client: redis.Redis, arena: Arena) -> LedgerScripts:
    """Returns the ledger that the arena's header names, if this Redis contains it. Otherwise, builds a new ledger.
    Raises LedgerUnavailable if Redis does not answer, and StaleDataset if Redis was flushed during the call. The caller
    may try again.
    """
    ledger = LedgerScripts.attach(client, arena)
    try:
        found = client.hmget(ledger.tag + "meta", "dataset", "run_id")
        fixed = arena.fixed
        named = [fixed.dataset.encode(), fixed.run_id.encode()]
        if fixed.dataset and found == named and server_run_id(client) == fixed.run_id:
            return ledger
        ledger.dataset = rebuild(client, arena)
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise LedgerUnavailable(f"rebuild: {error}") from error
    return ledger


def rebuild(client: redis.Redis, arena: Arena, grace_s: float = LEASE_S) -> str:
    """Rebuilds the ledger and returns its dataset generation.

    Until all writers that were alive have asserted their blocks, but for at most `grace_s`, allocations evict no cached
    block. Raises the errors of redis, or StaleDataset if Redis was flushed during the call. The caller may try again.
    """
    tag = f"{{looseleaf:{arena.arena_id}}}:"
    run_id, dataset = server_run_id(client), secrets.token_hex(8)
    # The old ledger is deleted before the header names the new ledger, so that it grants no more blocks.
    client.delete(tag + "meta")
    highest = int(arena.generations.max()) >> 32
    count = max(arena.rebuild_count, highest) + 1
    arena.enter_ledger(run_id, dataset, count)
    census = take_census(arena)
    for key in list(client.scan_iter(f"{tag}*", count=1000)):
        client.unlink(key)
    _write(client, tag, census)
    args: list[str | int] = [dataset, run_id, arena.num_blocks, count, round(grace_s * 1000)]
    reply = client.register_script(source("open"))(keys=[tag + "meta"], args=args)
    if reply != b"+":
        raise StaleDataset("Redis was flushed while the ledger was built")
    counts = {state.name: len(census.blocks(state)) for state in BlockState}
    _LOG.info("ledger of arena %s built, number %d: %s, awaiting %s", arena.arena_id, count, counts, census.awaited)
    return dataset


def take_census(arena: Arena) -> Census:
    """Returns the block records that follow from the header. Call it only after the rebuild count has been raised."""
    alive = arena.live_writers()
    states = arena.states.copy()
    atomics.fence()  # any process that reads the state SEALED then also reads the hash of that seal
    hashes, slots = arena.hashes.copy(), arena.writer_slots.copy()
    records = np.zeros(arena.num_blocks, RECORDS)
    records["state"] = BlockState.FREE
    records["generation"] = arena.generations
    writing = (states == HeaderState.WRITING) & np.isin(slots, alive)
    records["state"][writing] = BlockState.QUARANTINE
    records["slot"][writing] = slots[writing]
    sealed = states == HeaderState.SEALED
    # Partial blocks and duplicates are not in the index. If a living writer holds them, it soon asserts them.
    records["state"][sealed] = BlockState.QUARANTINE if alive else BlockState.FREE
    indexed = _first_of_each_hash(sealed, hashes)
    records["state"][indexed] = BlockState.CACHED
    records["hashed"][indexed] = 1
    records["hash"][indexed] = hashes[indexed].view("S32").ravel()
    return Census(records, tuple(alive))


def _first_of_each_hash(sealed: npt.NDArray[np.bool_], hashes: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Returns, for each hash, the number of the first sealed full block that has it, since the index names one block
    per hash.
    """
    full = np.flatnonzero(sealed & hashes.any(axis=1))
    whole = np.ascontiguousarray(hashes[full]).view("S32").ravel()
    return full[np.unique(whole, return_index=True)[1]]


def _write(client: redis.Redis, tag: str, census: Census) -> None:
    """Writes the keys that list blocks. `open` writes `meta` later; without `meta`, no script uses the other keys."""
    packed = census.records.tobytes()
    size = RECORDS.itemsize * _CHUNK
    for first in range(0, len(packed), size):
        client.append(tag + "blocks", packed[first : first + size])  # type: ignore[arg-type]
    free, cached = census.blocks(BlockState.FREE), census.blocks(BlockState.CACHED)
    waiting = census.blocks(BlockState.QUARANTINE)
    for part in _parts(free.tolist()):
        client.rpush(tag + "free", *part)
    # Coldest first. Most chains are allocated in ascending order, so in descending order their tails are evicted first.
    for part in _parts(list(enumerate(cached[::-1].tolist(), 1))):
        client.zadd(tag + "cached", {str(block): score for score, block in part})
    for part in _parts(cached.tolist()):
        client.hset(tag + "index", mapping={census.records["hash"][b].ljust(32, b"\0"): b for b in part})
    for part in _parts(waiting.tolist()):
        client.zadd(tag + "quarantine", {str(b): int(census.records["slot"][b]) for b in part})
    if census.awaited:
        client.sadd(tag + "awaited", *census.awaited)


def _parts(items: list[Any]) -> Iterator[list[Any]]:
    for first in range(0, len(items), _CHUNK):
        yield items[first : first + _CHUNK]
