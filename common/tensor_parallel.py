"""Limits and defaults of tensor and pipeline parallelism, for the engine and the launcher (docs/parallel.md)."""

from __future__ import annotations

MOST_RANKS = 8
"""The largest number of shares of a layer, and the largest number of stages of a model."""
DEFAULT_PARTS = 4
"""Number of parts into which a product's inputs are divided if a worker has 2 or 4 tensor-parallel ranks. With the same
number of parts, a model's results have the same bits on 1, 2 and 4 ranks.
"""


def default_parts(size: int) -> int:
    """Returns the number of parts for a deployment whose largest worker has `size` tensor-parallel ranks."""
    return 1 if size == 1 else max(DEFAULT_PARTS, size)
