"""An arena's blocks in device memory, as one process has them: allocated here, or opened through CUDA IPC.

Independent of the arena's header. The allocating process must outlive all that opened it: a mapping whose owner has
ended is undefined by NVIDIA's documentation, so a worker whose arena is lost ends itself (`arena.ArenaLost`).
"""

from __future__ import annotations

from typing import Any

from block_store.arena.cuda import CudaDevice
from block_store.arena.header import round_up

GRANULE_BYTES = 2 << 20
"""Smaller pieces may share an allocation of the driver, all of which an IPC handle would open."""


class DeviceBlocks:
    """uint8 [num_blocks, block_bytes] on a device, rows contiguous. Errors of all methods: CudaError."""

    def __init__(self, device: CudaDevice, pointer: int, num_blocks: int, block_bytes: int, *, is_owner: bool) -> None:
        self.device = device
        self.pointer = pointer
        self.shape = (num_blocks, block_bytes)
        self.is_owner = is_owner
        self._is_open = True

    @classmethod
    def allocate(cls, device: CudaDevice, num_blocks: int, block_bytes: int) -> DeviceBlocks:
        """New blocks, all zeros; they die with this process. CudaError: CUDA_ERROR_OUT_OF_MEMORY."""
        pointer = device.alloc(device_bytes(num_blocks, block_bytes))
        return cls(device, pointer, num_blocks, block_bytes, is_owner=True)

    @classmethod
    def open(cls, device: CudaDevice, handle: bytes, num_blocks: int, block_bytes: int) -> DeviceBlocks:
        """What another process of this host allocated. CudaError: it has ended, or IPC does not reach it."""
        return cls(device, device.open(handle), num_blocks, block_bytes, is_owner=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, so that `torch.as_tensor(blocks, device="cuda")` sees this memory without a copy.

        No stream: callers order their own work. The tensor keeps this object, not the mapping, alive.
        """
        return {"shape": self.shape, "typestr": "|u1", "data": (self.pointer, False), "version": 3, "strides": None}

    def export(self) -> bytes:
        """The 64-byte handle for `open`. CudaError: this host cannot (some containers, WSL)."""
        return self.device.export(self.pointer)

    def read(self, block: int) -> bytes:
        """A copy of a block's bytes on the host. IndexError."""
        return self.device.read(self._at(block), self.shape[1])

    def write(self, block: int, data: bytes) -> None:
        """Fills a block from the host. IndexError; ValueError: not a block's length."""
        if len(data) != self.shape[1]:
            raise ValueError(f"a block has {self.shape[1]} bytes, not {len(data)}")
        self.device.write(self._at(block), data)

    def close(self) -> None:
        """Frees the memory, or unmaps it if another process owns it. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            (self.device.free if self.is_owner else self.device.close_opened)(self.pointer)

    def _at(self, block: int) -> int:
        if not 0 <= block < self.shape[0]:
            raise IndexError(f"block {block} of {self.shape[0]}")
        return self.pointer + block * self.shape[1]


def device_bytes(num_blocks: int, block_bytes: int) -> int:
    """Size of the allocation."""
    return round_up(num_blocks * block_bytes, GRANULE_BYTES)
