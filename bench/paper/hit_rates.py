"""Measures the hit rates of the prefix index on a trace of requests with shared prefixes (Mooncake), by the capacity of
the cache.

Runs every prompt's block hashes against a real arena and a real ledger: acquires the cached prefix, allocates and seals
the other blocks, and releases all. A block stands for 512 tokens of the trace, but holds 16 positions of a tiny layout,
because only the bookkeeping counts. `lru_hits` simulates an ideal LRU cache of the same capacity.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper.parts import Claim, Options, Section, table
from block_store.arena.arena import Arena
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.rebuild import open_ledger
from block_store.redis import redis_server
from common.types import KvLayout, KvSpec
from loadtest.svg import axis_of, lines
from loadtest.workload import MOONCAKE_TRACE
from looseleaf.simulation.trace import MOONCAKE_BLOCK, BlockKey, read

LIMIT_S = 260
CAPACITIES = (1_000, 3_000, 10_000, 30_000, 100_000)
QUICK_REQUESTS, QUICK_CAPACITIES = 600, (1_000, 3_000)
LAYOUT = KvLayout(16, (KvSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16"),))
CEILING = 40.0
"""The share in percent that Mooncake's paper states for this trace and an unlimited cache (FAST 2025, table 2)."""
MARGIN = 2.0
"""The tolerance of the claims, in percentage points."""


def measure(options: Options) -> dict[str, Any]:
    requests = read(MOONCAKE_TRACE, count=QUICK_REQUESTS if options.quick else None)
    prompts = [request.block_keys(MOONCAKE_BLOCK)[: (request.prompt_len - 1) // MOONCAKE_BLOCK] for request in requests]
    tokens = sum(request.prompt_len for request in requests)
    distinct = len({key for prompt in prompts for key in prompt})
    capacities = QUICK_CAPACITIES if options.quick else CAPACITIES

    def share(hits: int) -> float:
        return round(100 * hits * MOONCAKE_BLOCK / tokens, 1)

    return {
        "requests": len(requests), "tokens": tokens, "blocks": sum(map(len, prompts)), "distinct": distinct,
        "unlimited": share(lru_hits(prompts, distinct)),
        "rates": {
            str(capacity): {"ledger": share(ledger_hits(prompts, capacity)), "lru": share(lru_hits(prompts, capacity))}
            for capacity in capacities
        },
    }  # fmt: skip


def ledger_hits(prompts: Sequence[Sequence[BlockKey]], capacity: int) -> int:
    """Returns the number of blocks that the prompts find in an arena of `capacity` blocks."""
    hits = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="looseleaf-hits-") as directory:
        redis = redis_server.connect(None, directory)
        arena = Arena.create(Path(directory), LAYOUT, capacity)
        ledger = open_ledger(redis.client, arena)  # before any writer slot: a new ledger waits for the holders of slots
        slot = arena.acquire_writer_slot()
        holder = LedgerClient.register(ledger, "hits", writer_slot=slot.number)
        held = HeldBlocks(holder, arena, slot)
        for prompt in prompts:
            hashes = [hashlib.sha256(repr(key).encode()).digest() for key in prompt]
            [found] = held.acquire([hashes]) if hashes else [[]]
            new = held.alloc(len(hashes) - len(found))
            sealed = held.seal([SealItem(*pair) for pair in zip(new, hashes[len(found) :], strict=True)])
            held.release([*found, *sealed])
            hits += len(found)
        holder.close()
        slot.close()
        redis.close()
    return hits


def lru_hits(prompts: Sequence[Sequence[BlockKey]], capacity: int) -> int:
    """Returns the number of blocks that the prompts find in an ideal LRU cache, which evicts the last block of a prompt
    before the earlier ones.
    """
    cache: OrderedDict[BlockKey, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        found = 0
        while found < len(prompt) and prompt[found] in cache:
            found += 1
        hits += found
        for key in reversed(prompt):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def section(result: Mapping[str, Any]) -> Section:
    rates = {int(capacity): rate for capacity, rate in result["rates"].items()}
    worst = max(rate["lru"] - rate["ledger"] for rate in rates.values())
    unlimited = result["unlimited"]
    claims = [
        Claim(
            "share of prompt tokens that an unlimited cache finds, conversation trace", "Mooncake, table 2",
            f"{CEILING:g} %", f"{unlimited} %", abs(unlimited - CEILING) <= MARGIN,
            "" if abs(unlimited - CEILING) <= MARGIN else "here, only full blocks are found; how the paper counts "
            "the last block of a prompt was not checked",
        ),
        Claim(
            "the prefix index finds what an ideal LRU cache of the same capacity finds", "Mooncake, section 4",
            "LRU", f"at most {worst:.1f} points less", worst <= MARGIN,
            "" if worst <= MARGIN else "the eviction order differs from LRU",
        ),
    ]  # fmt: skip
    described = (
        f"The conversation trace of Mooncake ({result['requests']:,} requests, {result['tokens']:,} prompt tokens, "
        f"{result['blocks']:,} full blocks of 512 tokens, {result['distinct']:,} of them different) runs through a "
        "real arena and a real ledger, one request after the other: acquire the cached prefix, allocate and seal the "
        "other blocks, release all. The table shows the share of prompt tokens found, beside the share that an ideal "
        f"LRU cache finds. An unlimited cache finds {unlimited} %. No model runs.\n\n"
        + table(
            ["blocks", "prefix index", "ideal LRU"],
            [[f"{capacity:,}", f"{rate['ledger']} %", f"{rate['lru']} %"] for capacity, rate in rates.items()],
        )
    )
    series = {
        "prefix index": [(capacity, rate["ledger"]) for capacity, rate in rates.items()],
        "ideal LRU": [(capacity, rate["lru"]) for capacity, rate in rates.items()],
    }
    plot = lines(
        "Prompt tokens found in the cache, by its capacity",
        axis_of("blocks of 512 tokens", [*rates], log=True),
        axis_of("% of prompt tokens", [unlimited], zero=True),
        series,
    )
    return Section("Prefix hit rates on a trace", described, claims, {"hit_rates.svg": plot})
