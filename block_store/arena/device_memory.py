"""An arena's blocks in device memory, either allocated by this process or opened through CUDA IPC.

The allocating process must outlive all processes that have opened the memory. According to NVIDIA's documentation, the
use of a mapping whose owner has ended is undefined, so a worker whose arena is lost exits (`errors.ArenaLost`).
"""

from __future__ import annotations

from typing import Any

from block_store.arena.cuda import CudaDevice
from block_store.arena.header import round_up

GRANULE_BYTES = 2 << 20
"""Allocations are rounded up to a multiple of this size. Otherwise, the driver could place an allocation together with
other memory, and the IPC handle would expose both.
"""


class DeviceBlocks:
    """A uint8 array [num_blocks, block_bytes] on a device, with contiguous rows. Methods raise CudaError if a driver
    call fails.
    """

    def __init__(self, device: CudaDevice, pointer: int, num_blocks: int, block_bytes: int, *, is_owner: bool) -> None:
        self.device = device
        self.pointer = pointer
        self.shape = (num_blocks, block_bytes)
        self.is_owner = is_owner
        self._is_open = True

    @classmethod
    def allocate(cls, device: CudaDevice, num_blocks: int, block_bytes: int) -> DeviceBlocks:
        """Allocates blocks of zeros, which exist until `close` is called or this process ends. Raises CudaError if
        there is not enough memory.
        """
        pointer = device.alloc(device_bytes(num_blocks, block_bytes))
        return cls(device, pointer, num_blocks, block_bytes, is_owner=True)

    @classmethod
    def open(cls, device: CudaDevice, handle: bytes, num_blocks: int, block_bytes: int) -> DeviceBlocks:
        """Opens blocks of another process on this host. Raises CudaError if that process has ended or IPC cannot reach
        it.
        """
        return cls(device, device.open(handle), num_blocks, block_bytes, is_owner=False)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the CUDA array interface, through which `torch.as_tensor(blocks, device="cuda")` uses this
        memory without a copy.

        The interface names no stream, so callers must order their own work. The tensor keeps this object alive, but
        `close` frees or unmaps the memory even while the tensor exists.
        """
        return {"shape": self.shape, "typestr": "|u1", "data": (self.pointer, False), "version": 3, "strides": None}

    def export(self) -> bytes:
        """Returns the 64-byte handle for `open`. Raises CudaError if this host cannot export (some containers, WSL)."""
        return self.device.export(self.pointer)

    def read(self, block: int) -> bytes:
        """Returns a copy of a block's bytes on the host. Raises IndexError if there is no such block."""
        return self.device.read(self._at(block), self.shape[1])

    def write(self, block: int, data: bytes) -> None:
        """Fills a block with `data` from the host. Raises ValueError if `data` does not have a block's length, and
        IndexError if there is no such block.
        """
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
    """Returns the size of an allocation for these blocks, in bytes."""
    return round_up(num_blocks * block_bytes, GRANULE_BYTES)
