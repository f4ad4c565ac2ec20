"""A second process that takes a block while the first process reads it, for tests of the reader rule. The second
process acts like a writer that has received the block after the lease of the previous holder had expired: it raises the
block's generation in the header, records its writer slot, and writes. The ledger is not involved.
"""

from __future__ import annotations

import sys

from block_store.arena.arena import Arena
from common.types import BlockRef
from testing.ledger.store import line, python


class Thief:
    """A process that takes blocks of the arena, through its own mapping."""

    def __init__(self, arena: Arena) -> None:
        code = "from testing.ledger.block_thief import main; main()"
        self._process = python(code, str(arena.directory))
        assert line(self._process) == "ready"

    def take(self, block: int) -> None:
        """Takes a block. Returns when it has been reallocated and overwritten."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{block}\n")
        assert line(self._process) == "taken"

    def close(self) -> None:
        self._process.communicate(timeout=60)


def main() -> None:
    """Takes the blocks whose numbers arrive on standard input. Runs in the other process."""
    arena = Arena.open(sys.argv[1])
    print("ready", flush=True)
    for text in sys.stdin:
        block = int(text)
        slot = arena.acquire_writer_slot()
        arena.raise_generations([BlockRef(block, int(arena.generations[block]) + 1)], slot.number)
        arena.data[block] = 0x3D  # 0.046 as bfloat16: finite, but not KV that any model computes
        slot.close()
        print("taken", flush=True)
