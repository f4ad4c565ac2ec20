"""Copies the sealed full blocks of an arena to disk in a separate thread, usually before they can be evicted.

Finds the blocks through the arena's header, without the ledger. If a block is reallocated while it is copied, the copy
is dropped.
"""

from __future__ import annotations

import logging
import threading

import numpy as np
import xxhash

from block_store.arena.arena import Arena
from block_store.arena.header import HeaderState
from block_store.disk.block_file import BlockFile
from block_store.errors import BlockStoreError
from common.telemetry import Fallbacks
from common.types import BlockRef

logger = logging.getLogger("disk")
INTERVAL_S = 0.1
"""Seconds between two scans of the header."""
PAUSE_S = 10.0
"""Seconds for which nothing is stored after the disk has failed to store a block."""


class WriteBehind:
    """A thread that copies the sealed full blocks of one arena to disk. `stop` makes a last scan before the thread
    ends. The thread's priority is not lowered: while it waits for a core, it may have the interpreter's lock, which
    restores need.
    """

    def __init__(self, arena: Arena, file: BlockFile) -> None:
        self._arena = arena
        self._file = file
        self._seen = np.zeros(arena.num_blocks, np.uint64)  # [num_blocks], the generation that was handled last
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._fallbacks = Fallbacks(logger)
        self.num_stored = 0
        """Number of blocks that were written to disk."""

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Ends the thread after a last scan. Returns False if the thread is still running after the timeout."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = INTERVAL_S
        while not self._stop.wait(pause_s):
            pause_s = PAUSE_S if self._tried_scan() is None else INTERVAL_S
        self._tried_scan()

    def _tried_scan(self) -> int | None:
        try:
            return self.scan()
        except (OSError, BlockStoreError) as error:
            self._fallbacks.note("block not stored on disk", str(error))
            return None

    def scan(self) -> int:
        """Stores the sealed full blocks that have been sealed since earlier scans and are not on disk, except blocks
        that are reallocated during the scan. Returns the number of stored blocks. Raises OSError if the disk fails to
        store a block, and CudaError if a block cannot be read from device memory.
        """
        states, generations = self._arena.states, self._arena.generations
        num_before = self.num_stored
        for block in np.flatnonzero((states == HeaderState.SEALED) & (generations != self._seen)):
            generation = generations[block]
            if self._is_done(int(block), int(generation)):
                self._seen[block] = generation
        return self.num_stored - num_before

    def _is_done(self, block: int, generation: int) -> bool:
        """Stores a block, unless it is partial or already on disk. Returns False if the block has been reallocated."""
        arena = self._arena
        prefix_hash = arena.hashes[block].tobytes()

        def is_current() -> bool:
            return arena.states[block] == HeaderState.SEALED and arena.check_refs([BlockRef(block, generation)])

        if not is_current():
            return False
        if not any(prefix_hash) or prefix_hash in self._file:
            return True
        data = arena.view(block)
        # The seal of a block in device memory computes no digest (`Arena.seal_digests`).
        digest = int(arena.digests[block]) or xxhash.xxh3_64_intdigest(data)
        is_stored = self._file.store(prefix_hash, digest, data, is_current)
        self.num_stored += is_stored
        return is_stored
