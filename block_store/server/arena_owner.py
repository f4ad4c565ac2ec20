"""Creates or finds the store's arena, opens its ledger, reaps silent holders, and removes the arena at the end.

The methods block, so callers on the event loop run them in threads.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from block_store.arena.arena import FILE_NAME, Arena
from block_store.arena.cuda import Cuda, CudaDevice
from block_store.arena.header import Memory
from block_store.arena.placement import create_on_device, has_live_memory, place_name
from block_store.arena.prefault import Prefault
from block_store.arena.promotion import Promotion
from block_store.errors import ArenaError, LedgerUnavailable, StaleDataset
from block_store.ledger.reaper import Reaper
from block_store.ledger.rebuild import open_ledger
from block_store.ledger.scripts import LedgerScripts
from block_store.redis.redis_server import RedisHandle
from block_store.redis.registry import StoreRecord
from block_store.server.disk_tier import DiskTier
from block_store.server.sizing import DeviceLimits, WorkerNeeds, device_limits, node_limits, size_arena
from block_store.settings import BlockStoreSettings
from block_store.transfer.known_tickets import KnownTickets
from common.errors import StartupError
from common.types import KvLayout

_LOG = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""Time in seconds for which the opening of the ledger is retried while Redis does not answer."""


class ArenaOwner:
    """The owner of at most one arena. `arena` and `ledger` are None until the arena is found or created, and after
    `drop_dead` has removed it.
    """

    def __init__(self, settings: BlockStoreSettings, redis: RedisHandle, address: str) -> None:
        """Loads the CUDA driver if the setting `device` is "cuda", and raises CudaUnavailable if the driver cannot be
        used or finds no GPU. Raises CannotSize if the size of the memory cannot be determined.
        """
        self._settings = settings
        self._redis = redis
        self._address = address
        self._directory = Path(settings.directory)
        self._reaper: Reaper | None = None
        self.arena: Arena | None = None
        self.ledger: LedgerScripts | None = None
        self._cuda = Cuda(settings.cuda_library) if settings.device == "cuda" else None
        self._device: CudaDevice | None = None
        self._drop_lock = threading.Lock()
        self._create_lock = threading.Lock()
        """Held by `create`, for which `close` waits."""
        self._closed = threading.Event()
        self.disk = (
            None
            if settings.kv_disk is None
            else DiskTier(settings.kv_disk_dir.expanduser(), settings.kv_disk, redis.url)
        )
        """The disk tier; None if blocks are not copied to disk."""
        self.known_tickets = KnownTickets()
        # Measured before the workers load their weights, so that the available memory includes room for these.
        self._limits = node_limits(self._directory, settings.memory_budget, settings.reserve_bytes)
        self._ahead: Prefault | None = None
        self._promotion: Promotion | None = None

    @property
    def redis_url(self) -> str:
        return self._redis.url

    def find(self) -> None:
        """Maps the arena that an earlier store left behind. If its blocks were in device memory whose owner has ended,
        removes the arena instead. If there is no arena, may begin to allocate memory for one. Raises ArenaError if the
        arena cannot be used, LedgerError if its ledger cannot be opened, and DiskTierError if the disk tier cannot be
        used.
        """
        if not (self._directory / FILE_NAME).exists():
            self._take_ahead()
            return
        arena = Arena.open(self._directory)
        if has_live_memory(arena):
            self._begin(arena)
            _LOG.info("found the arena %s", self._directory / FILE_NAME)
        else:
            self._lose(arena)

    def create(self, layout: KvLayout, needs: Sequence[WorkerNeeds], device_uuid: bytes) -> None:
        """Sizes and creates the arena, on the workers' device, or on the host if `device_uuid` is empty.

        Raises ArenaError if the workers use a device other than `--device` or the arena cannot be created, CannotSize
        if the workers do not fit into the memory, CudaUnavailable if the device cannot be used, LedgerError if the
        ledger cannot be opened, and DiskTierError if the disk tier cannot be used.
        """
        with self._create_lock:
            if self._closed.is_set():
                raise ArenaError("the block store is shutting down")
            self._create(layout, needs, device_uuid)

    def _create(self, layout: KvLayout, needs: Sequence[WorkerNeeds], device_uuid: bytes) -> None:
        self._check_place(device_uuid)
        device = self._open_device(device_uuid) if device_uuid else None
        sizing = size_arena(layout, needs, self._limits_of(device, needs), self._settings.num_blocks)
        for line in sizing.lines():
            _LOG.info("%s", line)
        if device is None:
            arena = self._create_on_host(layout, sizing.num_blocks)
        else:
            arena = create_on_device(self._directory, layout, sizing.num_blocks, device, self._settings.memory_owner)
        try:
            arena.keep_largest_floor(max((worker.floor_blocks for worker in needs), default=0))
            self._begin(arena)
        except BaseException:
            self._lose(arena)  # otherwise, its file and its device memory would prevent the next attempt
            arena.free_memory()
            raise

    def _take_ahead(self) -> None:
        """Begins to allocate the memory of a host arena in advance, if the setting `device` is "cpu". Does nothing if
        the user gave a budget or a number of blocks: the arena may then take nearly all memory, some of which workers
        need while they load.
        """
        settings = self._settings
        if settings.device != "cpu" or settings.memory_budget is not None or settings.num_blocks is not None:
            return
        try:
            limits = self._limits
            most_bytes = min(limits.room_bytes, limits.budget_bytes - limits.reserve_bytes)
            self._ahead = Prefault(self._directory, max(0, most_bytes))
        except OSError as error:
            _LOG.info("shared memory will be allocated when the arena is created: %s", error.strerror)

    def _create_on_host(self, layout: KvLayout, num_blocks: int) -> Arena:
        try:
            return Arena.create(self._directory, layout, num_blocks, ahead=self._ahead)
        finally:
            self._leave_ahead()

    def _leave_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def drop_dead(self) -> None:
        """Removes the arena if the owner of its device memory has died. The next call of `create` makes a new arena."""
        with self._drop_lock:
            if self.arena is not None and not has_live_memory(self.arena):
                self._stop_threads()
                self._lose(self.arena)
                self.arena = self.ledger = None

    def close(self) -> None:
        """Ends the disk tier and the sweeps. Removes the arena, even if an earlier store created it, unless
        `keep_arena` is set. An arena in the store's device memory is always removed. Waits for a creation that is
        running.
        """
        self._closed.set()
        with self._create_lock:
            self._close()

    def _close(self) -> None:
        if self.disk is not None:
            self.disk.end()
        self._stop_threads()
        self._leave_ahead()
        if self.arena is None or self.ledger is None:
            return
        dies_with_us = self.arena.memory is Memory.STORE_DEVICE
        if dies_with_us or not self._settings.keep_arena:
            self._lose(self.arena)

    def _begin(self, arena: Arena) -> None:
        ledger = self._open_patiently(arena)
        if self.disk is not None:
            self.disk.begin(arena)
        pulls = self._settings.pull_blocks and arena.memory is Memory.HOST
        record = StoreRecord(
            arena.arena_id, self._address, ledger.dataset, self._redis.run_id, str(arena.directory), arena.num_blocks,
            arena.layout.block_size, pulls,
        )  # fmt: skip
        self._reaper = Reaper(ledger, arena, self._redis, record)
        self._reaper.start()
        if arena.memory is Memory.HOST:
            self._promotion = Promotion(arena.mapping)
        self.arena, self.ledger = arena, ledger

    def _open_patiently(self, arena: Arena) -> LedgerScripts:
        """Opens the ledger. Retries while Redis does not answer, because at startup this error would end the launch.
        Raises the last error after PATIENCE_S seconds, or once `close` has been called.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return open_ledger(self._redis.client, arena)
            except (LedgerUnavailable, StaleDataset) as error:
                if time.monotonic() >= deadline or self._closed.wait(0.2):
                    raise
                _LOG.warning("the ledger cannot be opened yet: %s", error)

    def _lose(self, arena: Arena) -> None:
        """Ends an arena: declares it lost, so that processes that have mapped it no longer use it, and removes its
        ledger, if Redis answers, and its files.
        """
        _LOG.info("arena %s has ended: its blocks, ledger and files are removed", arena.arena_id)
        arena.declare_lost()
        try:
            LedgerScripts.attach(self._redis.client, arena).forget()
        except LedgerUnavailable as error:
            _LOG.warning("keys of arena %s may stay behind in Redis: %s", arena.arena_id, error)
        arena.remove()

    def _stop_threads(self) -> None:
        if self._reaper is not None:
            self._reaper.stop()
            self._reaper = None
        if self._promotion is not None:
            self._promotion.stop()
            self._promotion = None

    def _check_place(self, device_uuid: bytes) -> None:
        wanted = self._settings.device
        if wanted != "auto" and (wanted == "cuda") != bool(device_uuid):
            raise ArenaError(
                f"this block store has --device {wanted}, but its workers run on {place_name(device_uuid)}"
            )

    def _open_device(self, uuid: bytes) -> CudaDevice:
        if self._device is None or self._device.uuid != uuid:
            self._cuda = self._cuda or Cuda(self._settings.cuda_library)
            self._device = self._cuda.device_of(uuid)
        return self._device

    def _limits_of(self, device: CudaDevice | None, needs: Sequence[WorkerNeeds]) -> DeviceLimits:
        """Returns the limits of `device`, whose memory now contains the workers' contexts and weights. If `device` is
        None, returns the limits of the host.
        """
        if device is None:
            return self._limits
        info, settings = device.memory_info(), self._settings
        weights = sum(worker.weights_bytes for worker in needs)
        return device_limits(info.free, info.total, weights, settings.gpu_memory_utilization, settings.reserve_bytes)


class DirectoryLock:
    """A lock on the store's directory, so that only one store can use it.

    The constructor raises StartupError if another store is running there, or if the directory cannot be created or
    written.
    """

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
        """Releases the lock, and removes the directory if it is empty."""
        (self._directory / "store.lock").unlink(missing_ok=True)
        os.close(self._fd)
        if not any(self._directory.iterdir()):
            self._directory.rmdir()
