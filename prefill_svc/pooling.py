"""Pools the hidden states of a prompt into an embedding, chunk by chunk. With row-invariant kernels, the embedding's
bits do not depend on the batch or the division into chunks, because the mean adds the states one after another, in
fp64, in the order of their positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.types import Pooling

if TYPE_CHECKING:
    import torch

    from engine.sequence import Chunk

States = npt.NDArray[np.float32]


class Pool:
    """An accumulator of one prompt's hidden states."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._sum: npt.NDArray[np.float64] | None = None

    def add(self, states: States) -> None:
        """Adds the states [n, h] of the next positions. With the pooling "last", only the newest state is kept."""
        for state in states.astype(np.float64):
            self._sum = state if self._sum is None or self.pooling == "last" else self._sum + state

    def vector(self) -> list[float]:
        """Returns the embedding, a vector of length 1 with fp32 values."""
        assert self._sum is not None, "no state has been added"
        length = np.sqrt(np.sum(np.square(self._sum)))
        vector: list[float] = (self._sum / max(length, np.finfo(np.float64).tiny)).astype(np.float32).tolist()
        return vector


def take_pooled(plan: list[tuple[Any, Chunk]], states: torch.Tensor) -> None:
    """Adds the hidden states of a step's requested rows, fp32 [R, h], to the pools of their jobs. Must be called before
    `num_computed` is increased.
    """
    host, row = states.cpu().numpy(), 0
    for job, chunk in plan:
        num_rows = chunk.num_tokens if chunk.sequence.wants_every_row else int(chunk.completes)
        job.pool.add(host[row : row + num_rows])
        row += num_rows
