"""The numbers of tensor parallelism that the engine and the launcher share (docs/parallel.md)."""

from __future__ import annotations

MOST_RANKS = 8
DEFAULT_PARTS = 4
"""Parts of a product's inputs if a worker has several ranks: a model then has the same bits on 1, 2 and 4 of them."""


def default_parts(size: int) -> int:
    """Returns the parts for a deployment whose largest worker has `size` ranks."""
    return 1 if size == 1 else max(DEFAULT_PARTS, size)
