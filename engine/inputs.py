"""A buffer for the arrays of a step, which are packed end to end in pinned memory and sent to the device in one
transfer. On a CPU, the host side and the device side are the same memory, and sending does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
"""Alignment in bytes. Kernels load indices in words of up to 16 bytes."""
TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}
Shape = tuple[np.dtype[Any], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Place:
    """An array on the host and its copy on the device. Fill `host`, send the buffer, and use `device`."""

    host: npt.NDArray[Any]
    device: torch.Tensor


class StepBuffer:
    """A buffer of `num_bytes` in host memory (pinned for a GPU) and on the device, at fixed addresses."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._sent: torch.cuda.Event | None = None
        self._device = self._host
        if device.type == "cuda":
            self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._sent = torch.cuda.Event()

    @staticmethod
    def bytes_of(shapes: Sequence[Shape]) -> int:
        """Returns the number of bytes that `place` needs for arrays of these dtypes and shapes."""
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for dtype, shape in shapes)

    def place(self, shapes: Sequence[Shape]) -> list[Place]:
        """Returns arrays of these dtypes and shapes, one after another from the start of the buffer. Raises ValueError
        if they do not fit.
        """
        if (need := self.bytes_of(shapes)) > self.num_bytes:
            raise ValueError(f"{need} bytes do not fit into a buffer of {self.num_bytes}")
        places, at = [], 0
        for dtype, shape in shapes:
            size = math.prod(shape) * dtype.itemsize
            host = self._host.numpy()[at : at + size].view(dtype).reshape(shape)
            device = self._device[at : at + size].view(TORCH_DTYPES[dtype]).view(shape)
            places.append(Place(host, device))
            at += _aligned(size)
        return places

    def wait(self) -> None:
        """Waits until the last transfer has read the host's side, which may then be filled again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, num_bytes: int) -> None:
        """Starts the transfer of the first `num_bytes` on the current stream."""
        if self._sent is not None:
            self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
            self._sent.record()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
