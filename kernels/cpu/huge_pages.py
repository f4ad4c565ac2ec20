"""Moves packed weights to memory for which the kernel is asked to use huge pages. A step reads all weights, and the
addresses of 4 KiB pages do not fit into the TLB.
"""

from __future__ import annotations

import mmap
import threading

import torch
from torch import Tensor

from kernels.cpu.selection import count_fallback

PAGE_BYTES = 2 << 20
"""Size of a huge page on x86, and on ARM with pages of 4 KiB."""
REGION_BYTES = 32 << 20
"""Size of a region, unless a tensor is larger. Memory that no tensor uses is not occupied, except the rest of the last
used page.
"""
LEAST_BYTES = 1 << 17
"""Smaller tensors stay where they are."""
_ALIGNMENT = 64


class HugePages:
    """A source of memory in huge pages. A region is freed when no tensor uses it and it is not the latest one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def move(self, tensor: Tensor) -> None:
        """Gives a tensor new memory, with the same elements. Small tensors, and those that are not contiguous in the
        CPU's memory, keep theirs. If the kernel has no huge pages, this is logged once and counted under "huge pages".
        """
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return
        if (num_bytes := tensor.numel() * tensor.element_size()) < LEAST_BYTES:
            return
        try:
            room = self._take(num_bytes)
        except (OSError, AttributeError) as error:  # no such system call, no such constant
            count_fallback("huge pages", str(error), "in small pages")
            return
        tensor.data = room.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _take(self, num_bytes: int) -> Tensor:
        with self._lock:
            if self._used + num_bytes > len(self._region):
                self._region, self._used = _region(max(REGION_BYTES, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)), 0
            begin = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return self._region[begin : begin + num_bytes]


def _region(num_bytes: int) -> Tensor:
    """Returns uint8 [num_bytes], which begins at the start of a huge page. Raises OSError, or AttributeError on systems
    without huge pages.
    """
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE_BYTES :][:num_bytes]


move = HugePages().move
"""The method of the object that the process uses for all weights."""
