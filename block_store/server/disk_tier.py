"""The disk tier of a store's arena. It copies sealed blocks to disk in the background, and restores them when a prompt
needs them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from block_store.arena.arena import Arena
from block_store.arena.header import Memory
from block_store.disk.block_file import BlockFile
from block_store.disk.restore import Prefix, is_on_disk, restore
from block_store.disk.write_behind import WriteBehind
from block_store.errors import BlockStoreError, DiskTierError
from block_store.holder.attach import Attached, Needs
from common.telemetry import Fallbacks

logger = logging.getLogger("disk")
JOIN_S = 2.0
"""Maximum time in seconds for which the first registration of the holder of restored blocks delays workers. A
registration usually takes milliseconds.
"""


class DiskTier:
    """The disk tier of one arena. `begin` and `end` block; `restore` is called on the event loop."""

    def __init__(self, directory: Path, max_bytes: int, redis_url: str) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._redis_url = redis_url
        self._arena: Arena | None = None
        self._file: BlockFile | None = None
        self._writing: WriteBehind | None = None
        self._attached: Attached | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="disk")
        """Restores one prefix at a time, so that a prefix that several prompts share is read once."""
        self._joiner = ThreadPoolExecutor(1, thread_name_prefix="disk-join")
        self._joining: Future[None] | None = None
        self._fallbacks = Fallbacks(logger)
        self.num_restored = 0
        """Number of blocks that were restored from disk."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks on disk."""
        return 0 if self._file is None else len(self._file)

    @property
    def num_stored(self) -> int:
        """Number of blocks that have been written to disk since startup."""
        return 0 if self._writing is None else self._writing.num_stored

    @property
    def capacity_blocks(self) -> int:
        return 0 if self._file is None else self._file.num_slots

    def begin(self, arena: Arena) -> None:
        """Opens the file of the arena's layout and starts to copy blocks to it.

        Raises DiskTierError if this process cannot read the blocks, or if the file cannot be used.
        """
        if arena.memory is Memory.WORKER_DEVICE:
            raise DiskTierError(
                "--kv-disk needs blocks in host memory, or in GPU memory that the block store owns; the worker owns "
                "this arena's memory (--memory-owner worker, or no CUDA IPC)"
            )
        where = self._directory / arena.layout.fingerprint.hex()[:16]
        self._file = BlockFile(where, arena.block_bytes, self._max_bytes)
        self._writing = WriteBehind(arena, self._file)
        self._writing.start()
        self._arena = arena
        wait([self._join_soon()], JOIN_S)
        logger.info("%d blocks on disk in %s, of at most %d", len(self._file), where, self._file.num_slots)

    def end(self) -> None:
        """Makes a last scan for blocks to copy to disk, and ends the holder of restored blocks."""
        if self._attached is not None:
            self._attached.withdraw()  # ends the retries of a registration
        for thread in (self._joiner, self._thread):
            thread.shutdown(cancel_futures=True)
        has_ended = self._writing is None or self._writing.stop()
        if self._attached is not None:
            self._attached.close()
        if self._file is not None and has_ended:
            self._file.close()

    async def restore(self, prefix: Prefix) -> int:
        """Restores the missing blocks of the prefix (`disk.restore.restore`), and returns the number of blocks that
        came from disk. The number is 0 if the ledger refuses or does not answer, or while the holder of restored blocks
        is not registered.
        """
        if self._file is None or not is_on_disk(self._file, prefix):
            return 0
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._restore, prefix)

    def _restore(self, prefix: Prefix) -> int:
        attached = self._attached
        if self._file is None or attached is None or attached.is_fenced:
            self._join_soon()
            self._fallbacks.note("prefix not restored from disk", "the holder of restored blocks is registering")
            return 0
        try:
            num_blocks = restore(attached.held, self._file, prefix)
        except BlockStoreError as error:
            self._fallbacks.note("prefix not restored from disk", str(error))
            return 0
        self.num_restored += num_blocks
        return num_blocks

    def _join_soon(self) -> Future[None]:
        """Registers the holder of restored blocks in a thread, because a registration blocks while Redis does not
        answer.
        """
        if self._joining is None or self._joining.done():
            self._joining = self._joiner.submit(self._join)
        return self._joining

    def _join(self) -> None:
        """Registers the holder. It has no floor, because a prefix can always be computed instead."""
        arena = self._arena
        assert arena is not None
        needs = Needs(
            f"disk-{socket.gethostname()}-{arena.arena_id}", "disk", arena.layout, weights_bytes=0,
            peak_activation_bytes=0, max_model_len=0, floor_blocks=0,
        )  # fmt: skip
        try:
            if self._attached is None:
                self._attached = Attached(arena, self._redis_url, needs)
            else:
                self._attached.renew()
        except BlockStoreError as error:
            self._fallbacks.note("no holder for restored blocks", str(error))
