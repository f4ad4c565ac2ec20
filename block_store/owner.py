"""The store's arena from cradle to grave: found or sized and made, its ledger begun, silent holders reaped, removed.

Blocking; the service calls it in threads. Knows nothing of gRPC.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from block_store.arena import FILE_NAME, Arena
from block_store.ledger import Ledger
from block_store.reaper import Reaper
from block_store.redis_server import RedisHandle
from block_store.registry import StoreRecord, WorkerRegistry
from block_store.settings import BlockStoreSettings
from block_store.sizing import WorkerNeeds, node_limits, size_arena
from common.errors import StartupError
from common.types import KvLayout

_LOG = logging.getLogger(__name__)


class ArenaOwner:
    """At most one arena. `arena` and `ledger` are None until it is found or made."""

    def __init__(self, settings: BlockStoreSettings, redis: RedisHandle, address: str) -> None:
        self._settings = settings
        self._redis = redis
        self._address = address
        self._directory = Path(settings.directory)
        self._created = False
        self._reaper: Reaper | None = None
        self.arena: Arena | None = None
        self.ledger: Ledger | None = None
        # Sized before the workers load their weights: what is available then includes them.
        self._limits = node_limits(self._directory, settings.memory_budget, settings.reserve_bytes)

    @property
    def redis_url(self) -> str:
        return self._redis.url

    def find(self) -> None:
        """Maps the arena that a store before this one left, if there is one. Errors: ArenaError, LedgerError."""
        if (self._directory / FILE_NAME).exists():
            self._begin(Arena.open(self._directory))
            _LOG.info("found the arena %s", self._directory / FILE_NAME)

    def create(self, layout: KvLayout, needs: Sequence[WorkerNeeds]) -> None:
        """Sizes and makes the arena. Errors: CannotSize, NotEnoughSharedMemory, LedgerError."""
        sizing = size_arena(layout, needs, self._limits, self._settings.num_blocks)
        for line in sizing.lines():
            _LOG.info("%s", line)
        arena = Arena.create(self._directory, layout, sizing.num_blocks)
        self._created = True
        self._begin(arena)

    def close(self) -> None:
        """Ends the sweeps; removes an arena that was made here, unless it is to be kept."""
        if self._reaper is not None:
            self._reaper.stop()
        if self.arena is not None and self.ledger is not None and self._created and not self._settings.keep_arena:
            self.ledger.forget()
            self.arena.remove()

    def _begin(self, arena: Arena) -> None:
        ledger = Ledger.initialise(self._redis.client, arena)
        record = StoreRecord(
            arena.arena_id, self._address, ledger.dataset, self._redis.run_id, str(arena.directory), arena.num_blocks,
            arena.layout.block_size,
        )  # fmt: skip
        self._reaper = Reaper(ledger, arena, WorkerRegistry(self._redis.client), record)
        self._reaper.start()
        self.arena, self.ledger = arena, ledger


class DirectoryLock:
    """Held by the one store of a directory. StartupError: another one lives there, or the directory cannot be made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(directory / "store.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o660)
        except OSError as error:
            raise StartupError(
                f"--directory {directory}: {error.strerror}; it must be on writable shared memory"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise StartupError(f"--directory {directory} belongs to another block store that is running") from None

    def close(self) -> None:
        """Gives the directory up, and removes it if nothing is left in it."""
        (self._directory / "store.lock").unlink(missing_ok=True)
        os.close(self._fd)
        if not any(self._directory.iterdir()):
            self._directory.rmdir()
