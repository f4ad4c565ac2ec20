"""Divides the layers of a model into KV groups.

The layers of a group share block tables, because they keep the same positions. All groups use blocks of one arena,
which have equal sizes, so layers are divided into groups of equal size. Gemma 3 1B, for example, has 26 layers, of
which every sixth has full attention. They form one group of 4 layers with full attention and six groups of 4 windowed
layers; the last group has two unused places. vLLM's hybrid KV cache manager divides layers in the same way
(vllm/v1/core/kv_cache_utils.py).

The state of a recurrent layer has the same size for any sequence length. A group holds as many states as fit into a
block of the attention layers, but at least one. If there are no attention layers, all states form one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.types import DType, KvKind, KvLayout, KvSpec


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """A description of what one layer stores for a sequence. This may be keys and values, a recurrent state, both, or
    nothing.
    """

    attends: bool = True
    window: int | None = None
    """Sliding window of the layer's attention in tokens; None for full attention."""
    state_bytes: int = 0
    """Size of the layer's recurrent state in bytes; 0 if the layer has no recurrent state."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """A group of layers that share block tables."""

    window: int | None
    """Sliding window of the layers in tokens; None for full attention and for states."""
    layers: tuple[int, ...]
    """Indices of the layers, in the order of their places in a block."""
    has_states: bool = False
    """Whether the blocks contain recurrent states of the layers instead of keys and values."""


def cut(windows: dict[int, int | None]) -> tuple[int, tuple[LayerGroup, ...]]:
    """Returns the number of layers for which a block has places, and the groups. Groups with full attention come first.
    `windows` maps each attention layer to its sliding window, or to None for full attention.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in windows.items():
        kinds.setdefault(window, []).append(layer)
    places = _places([len(layers) for layers in kinds.values()])
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[1]))
    groups = [LayerGroup(window, part) for window, layers in ordered for part in _parts(layers, places)]
    return places, tuple(groups)


def layout_of(
    layers: Sequence[LayerMemory], num_kv_heads: int, head_dim: int, dtype: DType, block_size: int
) -> tuple[KvLayout, tuple[LayerGroup, ...]]:
    """Returns what a block of each KV group stores, and the layers of each group."""
    groups: list[LayerGroup] = []
    specs: list[KvSpec] = []
    if attention := {index: layer.window for index, layer in enumerate(layers) if layer.attends}:
        places, cut_groups = cut(attention)
        groups += cut_groups
        kinds = ((KvKind.FULL if group.window is None else KvKind.SLIDING, group.window) for group in cut_groups)
        specs += (KvSpec(places, num_kv_heads, head_dim, dtype, *kind) for kind in kinds)
    if states := [index for index, layer in enumerate(layers) if layer.state_bytes]:
        size = max(layer.state_bytes for layer in layers)
        fitting = specs[0].block_bytes(block_size) // size if specs else len(states)
        places = min(len(states), max(1, fitting))
        parts = _parts(states, places)
        groups += (LayerGroup(None, part, has_states=True) for part in parts)
        specs += [KvSpec(places, 0, 0, dtype, KvKind.STATE, state_bytes=size)] * len(parts)
    return KvLayout(block_size, tuple(specs)), tuple(groups)


def default_block_size(layers: Sequence[LayerMemory], bytes_per_token: int, least: int = 16) -> int:
    """Returns the smallest block size of 16, 32, 64 and 128 tokens, but at least `least`, for which the keys and values
    of a block, in all layers, take at least as much memory as the recurrent states of all layers. Returns 256 if there
    is none. `bytes_per_token` is the size of one token's keys and values in one layer.
    """
    states = sum(layer.state_bytes for layer in layers)
    per_token = bytes_per_token * sum(layer.attends for layer in layers)
    return next((size for size in (16, 32, 64, 128) if size >= least and size * per_token >= states), 256)


def _parts(layers: Sequence[int], places: int) -> list[tuple[int, ...]]:
    return [tuple(layers[first : first + places]) for first in range(0, len(layers), places)]


def _places(counts: Sequence[int]) -> int:
    """Returns the number of places in a group. It is the number of layers of the rarest kind, or of the most frequent
    kind if that is less than 1.25 times as large. A few unused places cost less than another table.
    """
    least, most = min(counts), max(counts)
    return most if most < 1.25 * least else least
