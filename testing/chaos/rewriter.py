"""A process that ends tickets early and rewrites the blocks that they held
(`python -m testing.chaos.rewriter DIRECTORY REDIS_URL`).

Each line of its input is a list of the epochs of tickets. The process makes the tickets' leases lapse, waits until they
have been reaped (for at most WAIT_S), allocates every block that no holder has, writes into all of these blocks, and
releases them. Then it prints the number of these blocks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from block_store.arena.arena import Arena
from block_store.errors import Exhausted
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.inspection import inspect
from block_store.ledger.scripts import LedgerScripts
from block_store.redis.redis_server import open_client
from common.types import BlockRef

WRONG = 0x3D
"""The byte with which blocks are overwritten. Two of these bytes are 0.046 as bfloat16, which is finite, but not KV
that a model computes.
"""
WAIT_S = 20.0


def main(directory: str, redis_url: str) -> None:
    arena = Arena.open(directory)
    slot = arena.acquire_writer_slot()
    ledger = LedgerScripts.attach(open_client(redis_url, arena.fixed.run_id), arena)
    held = HeldBlocks(LedgerClient.register(ledger, "rewriter", writer_slot=slot.number), arena, slot)
    print("ready", flush=True)
    for line in sys.stdin:
        left = set(line.split())
        deadline = time.monotonic() + WAIT_S
        while left and time.monotonic() < deadline:  # another host may extend a lease before the store reaps
            ledger.client.zadd(ledger.tag + "leases", dict.fromkeys(left, 1), xx=True)
            time.sleep(0.02)
            left &= {str(holder.epoch) for holder in inspect(ledger).holders}
        with without_floors(ledger):
            print(rewrite(held), flush=True)
    held.close()


@contextmanager
def without_floors(ledger: LedgerScripts) -> Iterator[None]:
    """Sets the floors of all workers to 0 inside a `with` block. Otherwise, the blocks of the last tickets, which are
    evicted last, would remain.
    """
    key = ledger.tag + "floors"
    floors: dict[bytes, bytes] = ledger.client.hgetall(key)  # type: ignore[assignment]
    if not floors:
        yield
        return
    ledger.client.hset(key, mapping=dict.fromkeys(floors, 0))  # type: ignore[arg-type]
    try:
        yield
    finally:
        ledger.client.hset(key, mapping=floors)  # type: ignore[arg-type]


def rewrite(held: HeldBlocks) -> int:
    """Allocates every block that no holder has, overwrites all of them with WRONG, and releases them. Returns their
    number.
    """
    taken: list[BlockRef] = []
    num_blocks = held.arena.num_blocks
    while num_blocks:
        try:
            refs = held.alloc(num_blocks)
        except Exhausted:
            num_blocks //= 2
            continue
        held.arena.data[[ref.block for ref in refs]] = WRONG
        taken += refs
    held.release(taken)
    return len(taken)


if __name__ == "__main__":
    main(*sys.argv[1:])
