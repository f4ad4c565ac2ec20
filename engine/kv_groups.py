"""The KV groups of a model: which layers share block tables because they attend alike.

All groups draw on one arena of equal blocks, so layers are cut into groups of equally many. Gemma 3 has five windowed
layers for each full one: 26 layers make one group of 4 full layers and six groups of 4 windowed ones, of which the last
has two unused places. vLLM's hybrid KV cache manager cuts in the same way (vllm/v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.types import DType, KvKind, KvLayout, KvSpec


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables."""

    window: int | None
    """Their sliding window in tokens; None for full attention."""
    layers: tuple[int, ...]
    """Indices of the layers, in the order of their places in a block."""


def cut(windows: Sequence[int | None]) -> tuple[int, tuple[LayerGroup, ...]]:
    """Returns how many layers a block has places for, and the groups, full attention first.

    `windows` has one entry for each layer.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    places = _places([len(layers) for layers in kinds.values()])
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[1]))
    groups = [
        LayerGroup(window, tuple(layers[first : first + places]))
        for window, layers in ordered
        for first in range(0, len(layers), places)
    ]
    return places, tuple(groups)


def layout_of(
    windows: Sequence[int | None], num_kv_heads: int, head_dim: int, dtype: DType, block_size: int
) -> KvLayout:
    """Returns what a block of each KV group stores. `windows` has one entry for each layer."""
    places, groups = cut(windows)
    kinds = ((KvKind.FULL if group.window is None else KvKind.SLIDING, group.window) for group in groups)
    return KvLayout(block_size, tuple(KvSpec(places, num_kv_heads, head_dim, dtype, *kind) for kind in kinds))


def _places(counts: Sequence[int]) -> int:
    """Returns the size of the groups: that of the rarest kind, or of the most frequent one if they differ by less than
    a quarter, because padding a few places is cheaper than another table.
    """
    least, most = min(counts), max(counts)
    return most if most < 1.25 * least else least
