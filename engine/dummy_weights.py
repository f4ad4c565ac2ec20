"""Random weights, for benchmarks and tests of a model without its checkpoint."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from engine.errors import ModelError

if TYPE_CHECKING:
    from engine.loader import Target

DUMMY_POOL = 1_048_573
"""Number of random values from which dummy weights are taken. It is a prime, so that the rows of a matrix differ."""
DUMMY_STD = 0.02


class DummySource:
    """A source of random weights that depend only on seed, name, shape and dtype. Tensors whose names end in `.bias`
    are 0, other vectors (norms) are 1, and the elements of matrices are taken from a pool of DUMMY_POOL normally
    distributed values.
    """

    def __init__(self, seed: int, target: Target) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._device = target.device
        pool = (torch.randn(DUMMY_POOL, generator=generator) * DUMMY_STD).to(target.dtype).to(target.device)
        self._pool = pool.repeat(2)  # twice, so that a cut of up to DUMMY_POOL numbers may start anywhere

    def has(self, name: str) -> bool:
        return True

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=dtype, device=self._device)
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=self._device)
        size = shape[0] * shape[1]
        start = zlib.crc32(name.encode()) % DUMMY_POOL
        cut = self._pool[start : start + min(size, DUMMY_POOL)]
        return cut.repeat(-(-size // DUMMY_POOL))[:size].view(shape).to(dtype)

    def raw(self, name: str) -> torch.Tensor:
        raise ModelError(f"dummy weights are not quantized: there is no {name}")

    def unused(self) -> list[str]:
        return []
