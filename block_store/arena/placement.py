"""Allocates and opens the device memory of an arena on a GPU.

The owner of the memory is usually the block store, and workers open the memory through CUDA IPC. Without CUDA IPC, or
with `--memory-owner worker`, the owner is the only compute process, and all KV is lost when that process ends (promise
4 of docs/design.md does not hold). The owner holds a writer slot, so that every process can check whether the owner is
alive.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

from block_store.arena.arena import Arena
from block_store.arena.cuda import Cuda, CudaDevice, CudaError
from block_store.arena.device_memory import DeviceBlocks
from block_store.arena.header import Memory, Placement
from block_store.errors import ArenaBusy, ArenaError, ArenaLost
from common.types import KvLayout

_LOG = logging.getLogger(__name__)
MemoryOwner = Literal["auto", "store", "worker"]


class NoDeviceMemory(ArenaError):
    """Raised if device memory is not available or cannot be opened. The message gives the reason, and a remedy if there
    is one.
    """


def create_on_device(
    directory: Path, layout: KvLayout, num_blocks: int, device: CudaDevice, owner: MemoryOwner
) -> Arena:
    """Creates an arena whose blocks are in device memory. Either allocates the blocks (all zeros) in the calling
    process, which is the store, or leaves their allocation to the first worker.

    If `owner` is "auto", the worker owns the memory only if this process cannot export memory; this is logged. Raises
    NoDeviceMemory if the device lacks memory, or if `owner` is "store" and the memory cannot be exported. Also raises
    the errors of `Arena.create`.
    """
    exported = None if owner == "worker" else _export(layout, num_blocks, device, owner)
    if exported is None:
        return Arena.create(directory, layout, num_blocks, placement=Placement(Memory.WORKER_DEVICE, device.uuid))
    blocks, handle = exported
    with ExitStack() as undo:
        undo.callback(blocks.close)
        placement = Placement(Memory.STORE_DEVICE, device.uuid, ipc_handle=handle)
        arena = Arena.create(directory, layout, num_blocks, placement=placement)
        undo.callback(arena.remove)
        # Once a worker uses the arena, the slot is held until the process ends.
        slot = arena.acquire_writer_slot()
        undo.callback(slot.close)
        arena.place(replace(placement, owner_slot=slot.number))
        arena.use_memory(blocks, slot)
        undo.pop_all()
    return arena


def open_blocks(arena: Arena, cuda: Cuda) -> None:
    """Opens the blocks in the store's memory, or allocates them if the store has left the allocation to the worker.

    Raises NoDeviceMemory if the memory cannot be opened or allocated, ArenaBusy if another process owns it, ArenaLost
    if the arena is lost before its memory is allocated, and CudaUnavailable if this process does not see the device.
    """
    placement = arena.placement
    device = cuda.device_of(placement.device_uuid)
    try:
        if placement.memory is Memory.STORE_DEVICE:
            arena.use_memory(DeviceBlocks.open(device, placement.ipc_handle, arena.num_blocks, arena.block_bytes))
        else:
            _adopt(arena, device)
    except CudaError as error:
        raise NoDeviceMemory(f"{error}; {_advice(error)}") from error


def has_live_memory(arena: Arena) -> bool:
    """Returns False if the blocks were in device memory whose owner has died, and True otherwise. Device memory that no
    worker has allocated yet also counts as live.
    """
    placement = arena.placement
    return placement.memory is Memory.HOST or has_no_owner_yet(placement) or arena.is_writer_alive(placement.owner_slot)


def has_no_owner_yet(placement: Placement) -> bool:
    """Returns whether a worker must still allocate the device memory."""
    return placement.memory is Memory.WORKER_DEVICE and placement.owner_slot == 0


def place_name(device_uuid: bytes) -> str:
    """Returns a readable name of a device. An empty UUID means the CPU."""
    return f"GPU {device_uuid.hex()}" if device_uuid else "the CPU"


def _export(
    layout: KvLayout, num_blocks: int, device: CudaDevice, owner: MemoryOwner
) -> tuple[DeviceBlocks, bytes] | None:
    """Allocates memory and exports its handle. Returns None if the memory cannot be exported and `owner` permits
    that.
    """
    try:
        blocks = DeviceBlocks.allocate(device, num_blocks, layout.block_bytes)
    except CudaError as error:
        raise NoDeviceMemory(f"{num_blocks} blocks of {layout.block_bytes} bytes: {error}") from error
    try:
        return blocks, blocks.export()
    except CudaError as error:
        blocks.close()
        if owner == "store":
            raise NoDeviceMemory(f"{error}; this host has no CUDA IPC, which --memory-owner store needs") from error
        _LOG.warning("no CUDA IPC (%s): the worker owns the arena's memory, and all KV is lost when it ends", error)
        return None


def _adopt(arena: Arena, device: CudaDevice) -> None:
    """Allocates the blocks in this process and records this process in the header as their owner. Succeeds only
    once per arena.
    """
    with arena.exclusively():
        if arena.is_lost:
            raise ArenaLost(f"arena {arena.arena_id} is lost")
        if arena.placement.owner_slot:
            raise ArenaBusy(f"the device memory of arena {arena.arena_id} belongs to another process")
        arena.use_memory(DeviceBlocks.allocate(device, arena.num_blocks, arena.block_bytes))
        # The slot is held until the process ends: the holders' own slots come and go with their leases.
        arena.place(replace(arena.placement, owner_slot=arena.acquire_writer_slot().number))


def _advice(error: CudaError) -> str:
    if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
        return "lower --gpu-memory-utilization of the block store"
    return (
        "the store's device memory cannot be opened here. Containers must share a PID namespace and the GPU (docker: "
        "pid: service:...); else run one process with both roles and give the block store --memory-owner worker"
    )
