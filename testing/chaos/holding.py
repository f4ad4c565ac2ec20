"""A process that contains workers without a model, which hold many blocks
(`python -m testing.chaos.holding DIRECTORY REDIS_URL NUM_HOLDERS NUM_BLOCKS`). Each worker holds NUM_BLOCKS sealed
blocks and a reserve. The process prints "ready" when all workers hold their blocks. The workers then take and release
blocks as the steps of a sequence would, until a line of input arrives. The last line of output is JSON, with the
duration of the longest step and the number of blocks on which the ledger and a worker disagree.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time
from contextlib import suppress

from block_store.arena.arena import Arena
from block_store.errors import LedgerUnavailable
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.breaker import BUDGET_S
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.scripts import CHUNK, LedgerScripts
from block_store.redis.redis_server import open_client
from common.types import BlockRef

PACE_S = 0.01
STEPS_A_BLOCK = 16
BLOCKS_A_SEQUENCE = 8
RESERVE = 64


class Holding:
    """A worker without a model, and the blocks that it holds."""

    def __init__(self, arena: Arena, redis_url: str, name: str) -> None:
        slot = arena.acquire_writer_slot()
        client = open_client(redis_url, lambda: arena.fixed.run_id, call_timeout_s=BUDGET_S)
        holder = _register(LedgerScripts.attach(client, arena), name, slot.number)
        self.held = HeldBlocks(holder, arena, slot, RESERVE)
        self.refs: list[BlockRef] = []
        self.longest_step_s = 0.0
        self._num_steps = 0
        self._sequence: list[BlockRef] = []

    def fill(self, num_blocks: int) -> None:
        """Allocates and seals blocks under unique hashes until `num_blocks` are held, and then fills the reserve."""
        while (left := num_blocks - len(self.refs)) > 0:
            try:
                refs = self.held.alloc(min(CHUNK, left))
            except LedgerUnavailable:  # all workers fill at once
                time.sleep(PACE_S)
            else:
                self.refs += self.held.seal([SealItem(ref, secrets.token_bytes(32)) for ref in refs])
        self.held.top_up()

    def step(self) -> None:
        """Does the work of a decode step except the forward pass. Applies the reader rule and, in some steps, allocates
        a block or ends the sequence.
        """
        began = time.monotonic()
        self._num_steps += 1
        assert self.held.arena.check_refs([*self.refs[-BLOCKS_A_SEQUENCE:], *self._sequence])
        if self._num_steps % STEPS_A_BLOCK == 0:
            with suppress(LedgerUnavailable):  # the reserve is used up: the sequence waits
                self._sequence += self.held.alloc(1)
        if len(self._sequence) == BLOCKS_A_SEQUENCE:
            self.held.release(self._sequence)
            self._sequence = []
        self.longest_step_s = max(self.longest_step_s, time.monotonic() - began)

    def num_different(self) -> int:
        """Releases the current sequence and repeats all unanswered calls. Returns the number of blocks that only the
        holder or only the ledger records.
        """
        self.held.release(self._sequence)
        self.held.rejoining.settle_up()
        return len({*self.refs, *self.held._reserve} ^ set(self.held.holder.holdings()))


def _register(ledger: LedgerScripts, name: str, slot: int) -> LedgerClient:
    while True:
        with suppress(LedgerUnavailable):  # all workers call at once
            return LedgerClient.register(ledger, name, writer_slot=slot)
        time.sleep(PACE_S)


def main(argv: list[str]) -> None:
    directory, redis_url, num_holders, num_blocks = argv
    arena = Arena.open(directory)
    holdings = [Holding(arena, redis_url, f"holding-{secrets.token_hex(4)}") for _ in range(int(num_holders))]
    for holding in holdings:
        holding.fill(int(num_blocks))
    print("ready", flush=True)
    stop = threading.Event()
    threading.Thread(target=_wait_for_a_line, args=(stop,), daemon=True).start()
    while not stop.wait(PACE_S):
        for holding in holdings:
            holding.step()
    longest = max(holding.longest_step_s for holding in holdings)
    print(json.dumps({"longest_step_s": longest, "different": sum(holding.num_different() for holding in holdings)}))


def _wait_for_a_line(stop: threading.Event) -> None:
    sys.stdin.readline()
    stop.set()


if __name__ == "__main__":
    main(sys.argv[1:])
