"""Attaches a worker to a block store: maps the arena, registers the worker as a holder, and publishes its record.

The device memory of an arena is lost when the store that owns it ends. Workers then exit, because access to such memory
is undefined behavior in CUDA, and only a new process is certain to have no mapping of it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc

from block_store.arena.arena import Arena
from block_store.arena.cuda import LIBRARY, Cuda
from block_store.arena.header import Memory
from block_store.arena.placement import open_blocks
from block_store.errors import (
    ArenaBusy,
    ArenaLost,
    BlockStoreError,
    FloorsExceedArena,
    LedgerDamaged,
    LedgerError,
    LedgerUnavailable,
)
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.breaker import BUDGET_S
from block_store.ledger.client import LedgerClient
from block_store.ledger.reaper import SWEEP_S
from block_store.ledger.scripts import LEASE_S, LedgerScripts
from block_store.redis.adapter_registry import AdapterRegistry
from block_store.redis.redis_server import open_client
from block_store.redis.registry import WorkerRegistry
from common import convert
from common.errors import StartupError
from common.rpc import open_blocking_channel
from common.status import error_of
from common.telemetry import Fallbacks, fallback_counts
from common.trust import NO_TRUST, Trust
from common.types import KvLayout, WorkerLoad, WorkerRecord
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc

logger = logging.getLogger("attach")
PREDECESSOR_S = 10.0
"""Seconds for which a starting worker retries its registration, so that the lease of a killed predecessor can end."""
GRANTED_FLOOR_S = LEASE_S + 4 * SWEEP_S
"""Seconds for which a worker tries to register with its granted floor, until a killed predecessor has been reaped."""
RENEW_TIMEOUT_S = 600.0
ATTACH_TIMEOUT_S = 600.0
"""Seconds to wait for the store, which may have to wait for the requests of other workers."""


@dataclass(frozen=True, slots=True)
class Needs:
    """A worker's identity, and its requirements for the arena."""

    worker_id: str
    role: str
    layout: KvLayout
    weights_bytes: int
    peak_activation_bytes: int
    max_model_len: int
    floor_blocks: int
    reserve_blocks: int = 0
    """Minimum number of blocks that the worker tries to keep allocated in advance."""
    device: str = "cpu"
    """Device on which the worker computes: "cpu", "cuda" or "cuda:N", with torch's numbering."""
    cuda_library: str = LIBRARY

    @property
    def cuda_ordinal(self) -> int | None:
        """Number of the GPU among the GPUs that are visible to this process, or None for the CPU."""
        kind, _, number = self.device.partition(":")
        return int(number or 0) if kind == "cuda" else None


class Attached:
    """A worker's attachment to a store, with its arena, its `HeldBlocks` and its entry in the registry."""

    def __init__(
        self, arena: Arena, redis_url: str, needs: Needs, granted_floor: int = 0, *, has_disk_tier: bool = False
    ) -> None:
        """Registers the worker. Its floor is the larger of `granted_floor` and `needs.floor_blocks`, or
        `needs.floor_blocks` if the larger floor does not fit into the arena for GRANTED_FLOOR_S seconds. Raises the
        last LedgerError if the registration keeps failing for PREDECESSOR_S seconds.
        """
        self.arena = arena
        self.floor_blocks = max(granted_floor, needs.floor_blocks)
        """Floor of the incarnation: the largest number of blocks that a sequence group may need on this worker. It
        never grows, so that the floors of all workers still fit after a rebuild.
        """
        self.has_disk_tier = has_disk_tier
        """Whether the store has a disk tier."""
        self._needs = needs
        self._client = open_client(redis_url, lambda: arena.fixed.run_id, call_timeout_s=BUDGET_S)
        # A longer timeout: only a worker that cannot publish for three seconds counts as gone.
        self._registry_client = open_client(redis_url)
        self._registry = WorkerRegistry(self._registry_client)
        self.adapters = AdapterRegistry(self._registry_client, Fallbacks(logger))
        self.adapter_status: Callable[[], Mapping[str, str]] = dict
        """Callback that returns `WorkerRecord.adapters`."""
        self._stop = threading.Event()
        self._announcer: threading.Thread | None = None
        self._record: WorkerRecord | None = None
        self.on_fenced: Callable[[], None] = lambda: None
        """Callback that runs in the thread that learns that the holder is fenced."""
        self.on_renewed: Callable[[], None] = lambda: None
        self.held = self._register_patiently(PREDECESSOR_S)

    def _register_patiently(self, timeout_s: float) -> HeldBlocks:
        """Registers the worker, and retries after a LedgerError, for example while a dead predecessor's floor still
        counts. After GRANTED_FLOOR_S seconds, a granted floor that does not fit is replaced by the floor that the
        worker requested: there are more workers than the store expected (`sizing.granted_floor`). Raises the last
        LedgerError after `timeout_s` seconds, or once `withdraw` has been called.
        """
        began, requested = time.monotonic(), self._needs.floor_blocks
        while True:
            try:
                return self._register()
            except LedgerError as error:
                waited_s = time.monotonic() - began
                if waited_s >= timeout_s or self._stop.wait(0.5):
                    raise
                logger.warning("cannot register yet: %s", error)
                is_final = isinstance(error, FloorsExceedArena) and waited_s >= GRANTED_FLOOR_S
                if is_final and self.floor_blocks > requested:
                    logger.warning("floor of %d blocks, not %d", requested, self.floor_blocks)
                    self.floor_blocks = requested

    def _register(self) -> HeldBlocks:
        slot, ledger = self.arena.acquire_writer_slot(), LedgerScripts.attach(self._client, self.arena)
        try:
            holder = LedgerClient.register(
                ledger,
                self._needs.worker_id,
                writer_slot=slot.number,
                floor=self.floor_blocks,
                on_fenced=lambda: self.on_fenced(),
            )
        except BaseException as error:
            slot.close()
            if isinstance(error, LedgerDamaged):
                with suppress(LedgerError):
                    ledger.distrust()
            raise
        return HeldBlocks(holder, self.arena, slot, reserve=self._needs.reserve_blocks)

    @property
    def weights_bytes(self) -> int:
        return self._needs.weights_bytes

    @property
    def is_fenced(self) -> bool:
        """Whether the incarnation has ended; if so, call `renew`."""
        return self.held.holder.fenced.is_set()

    def renew(self) -> None:
        """Gives up all blocks of a fenced worker and registers a new incarnation.

        Raises ArenaLost if the arena is lost, or a LedgerError if the registration keeps failing for RENEW_TIMEOUT_S
        seconds.
        """
        self.held.close()
        if self.arena.is_lost:
            raise ArenaLost(f"arena {self.arena.arena_id} is lost")
        self.held = self._register_patiently(RENEW_TIMEOUT_S)
        self.on_renewed()

    def announce(
        self, record: WorkerRecord, load: Callable[[], WorkerLoad], on_lost: Callable[[], object] = lambda: None
    ) -> None:
        """Publishes `record` with its current values every second, until `withdraw` is called or the arena is lost.
        While the worker is fenced, does not publish it, so that gateways use other workers.

        If the arena is lost, calls `on_lost` once, so that an idle worker also notices.
        """
        self._record = record
        fallbacks = Fallbacks(logger)

        def run() -> None:
            while True:
                if self.arena.is_lost:
                    logger.error("arena %s is lost: the block store that it belonged to has ended", record.arena_id)
                    on_lost()
                    return
                try:
                    if self.is_fenced:
                        fallbacks.note("record not published", "the worker is fenced and has not registered again yet")
                    else:
                        self._registry.publish(self._as_of_now(record, load()))
                except LedgerUnavailable as error:
                    fallbacks.note("record not published", str(error))
                except Exception:
                    logger.exception("the worker's record could not be published")
                if self._stop.wait(1.0):
                    return

        self._announcer = threading.Thread(target=run, name="announce", daemon=True)
        self._announcer.start()

    def _as_of_now(self, record: WorkerRecord, load: WorkerLoad) -> WorkerRecord:
        epoch, fallbacks = self.held.holder.epoch, fallback_counts()
        changes = {"load": load, "epoch": epoch, "max_group_blocks": self.floor_blocks, "fallbacks": fallbacks}
        return replace(record, adapters=self.adapter_status(), **changes)  # type: ignore[arg-type]

    def withdraw(self) -> None:
        """Ends the announcements and the retries of a registration, and removes the worker's record."""
        self._stop.set()
        if self._announcer is not None and self._record is not None:
            self._announcer.join(5.0)
            try:
                self._registry.withdraw(self._record.worker_id)
            except LedgerUnavailable as error:
                logger.warning("the worker's record was not removed and will expire: %s", error)

    def close(self) -> None:
        """Gives up all blocks, ends the incarnation, and closes the connections to Redis."""
        self.held.close()
        self._client.close()
        self._registry_client.close()


def attach(address: str, needs: Sequence[Needs], trust: Trust = NO_TRUST) -> list[Attached]:
    """Attaches all roles of one process to the store at `address`, with one mapping of the arena.

    All requests are sent at once, because a store without an arena waits for the requests of all expected workers.
    Raises StartupError if the store refuses or does not answer, or if the arena or ledger cannot be used.
    """
    replies = _ask(address, [_request_of(need) for need in needs], trust)
    directory, redis_url = replies[0].directory, replies[0].redis_url
    try:
        arena = _open(directory, needs[0])
        pairs = zip(needs, replies, strict=True)
        return [
            Attached(arena, redis_url, need, reply.floor_blocks, has_disk_tier=reply.has_disk_tier)
            for need, reply in pairs
        ]
    except BlockStoreError as error:
        raise StartupError(f"the arena in {directory} cannot be used: {error}") from None


def _request_of(needs: Needs) -> pb.AttachRequest:
    """Returns the request to attach. Raises StartupError if the worker's GPU does not exist."""
    return pb.AttachRequest(
        worker_id=needs.worker_id, role=needs.role, layout=convert.layout_to_pb(needs.layout),
        weights_bytes=needs.weights_bytes, peak_activation_bytes=needs.peak_activation_bytes,
        max_model_len=needs.max_model_len, floor_blocks=needs.floor_blocks, device_uuid=_device_uuid(needs),
    )  # fmt: skip


def _ask(address: str, requests: Sequence[pb.AttachRequest], trust: Trust) -> list[pb.AttachResponse]:
    """Returns the store's answers, which differ only in their floors.

    Raises StartupError at the first refusal, because the other calls would wait.
    """
    answered: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with open_blocking_channel(address, trust) as channel:
        stub = cast(Any, block_store_pb2_grpc.BlockStoreServiceStub)(channel)
        how = {"timeout": ATTACH_TIMEOUT_S, "wait_for_ready": True, "metadata": trust.metadata}
        calls = [stub.Attach.future(each, **how) for each in requests]
        for call in calls:
            call.add_done_callback(answered.put)
        for _ in calls:
            try:
                answered.get().result()
            except grpc.RpcError as error:
                raise StartupError(f"the block store at {address} refuses: {error_of(error).message}") from None
        return [call.result() for call in calls]


def _device_uuid(needs: Needs) -> bytes:
    """Returns the GPU's UUID, or empty bytes for the CPU. Raises StartupError if the GPU does not exist."""
    if needs.cuda_ordinal is None:
        return b""
    try:
        return Cuda(needs.cuda_library).device(needs.cuda_ordinal).uuid
    except BlockStoreError as error:
        raise StartupError(f"--device {needs.device}: {error}") from None


def _open(directory: str, needs: Needs) -> Arena:
    """Opens the arena and its blocks, in host or device memory."""
    arena = Arena.open(directory, needs.layout.fingerprint)
    if arena.memory is not Memory.HOST:
        try:
            open_blocks(arena, Cuda(needs.cuda_library))
        except ArenaBusy as error:
            raise ArenaBusy(f"{error}: without CUDA IPC, one process must run both roles (--roles both)") from None
    return arena
