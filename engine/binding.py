"""A model's view of an arena. It consists of the arena's memory as a tensor, and strided views for the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from common.types import DType, KvLayout, KvSpec
from engine.graphs import DecodeGraphs
from engine.kv_groups import LayerGroup
from engine.models.attention import LayerCache
from engine.models.fused import FusedDecoder
from kernels.kv_cache import by_word, row_width

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}


class DeviceArray(Protocol):
    """The interface of an array in GPU memory, uint8 [num_blocks, >= block_bytes], such as one of CuPy or numba."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


Arena = npt.NDArray[np.uint8] | torch.Tensor | DeviceArray


@dataclass(slots=True)
class Binding:
    """A bound arena, its views, and the CUDA graphs or the `FusedDecoder` that run over it."""

    arena: torch.Tensor  # uint8 [num_blocks, >= block_bytes]
    caches: dict[int, LayerCache]
    """Keys and values of each layer that attends."""
    states: dict[int, tuple[torch.Tensor, int]]
    """Recurrent states of each layer that has states, and the layer's KV group."""
    graphs: DecodeGraphs | None = None
    fused: FusedDecoder | None = None
    is_shared: bool = False
    """Whether other ranks, if there are any, bind the same memory."""

    @classmethod
    def of(
        cls,
        arena: Arena,
        layout: KvLayout,
        groups: Sequence[LayerGroup],
        device: torch.device,
        heads: slice = slice(None),
    ) -> Binding:
        """Returns a binding of the memory with this layout. `heads` are the KV heads of this rank.

        Raises ValueError for a wrong shape or dtype, or for memory on another device.
        """
        tensor = as_tensor(arena, device)
        shape, least = tuple(tensor.shape), layout.block_bytes
        if tensor.dtype != torch.uint8 or len(shape) != 2 or shape[1] < least or tensor.device.type != device.type:
            what = f"{tensor.dtype} {shape} on {tensor.device.type}"
            raise ValueError(f"an arena is uint8 [num_blocks, >= {least}] on {device.type}, not {what}")
        caches = {layer: cache.of_heads(heads) for layer, cache in layer_caches(tensor, layout, groups).items()}
        return cls(tensor, caches, state_caches(tensor, layout, groups))


def as_tensor(arena: Arena, device: torch.device) -> torch.Tensor:
    """Returns the arena's memory as a tensor, without a copy. Raises ValueError if the arena is a GPU array of a
    library other than torch and `device` is a CPU.
    """
    if isinstance(arena, torch.Tensor):
        return arena
    if isinstance(arena, np.ndarray):
        return torch.from_numpy(arena)
    if device.type == "cpu":
        raise ValueError("an arena in a GPU's memory cannot be bound to a runner on cpu")
    return torch.as_tensor(arena, device=device)


def layer_caches(arena: torch.Tensor, layout: KvLayout, groups: Sequence[LayerGroup]) -> dict[int, LayerCache]:
    """Returns strided per-layer views [num_blocks, kv_heads, block_size, row_width] of the block-major arena. Keys may
    be stored by word instead (`kernels.kv_cache`).

    The layers of a group are stored one after another in the group's blocks. A view also covers the blocks of other
    groups.
    """
    found: dict[int, LayerCache] = {}
    for spec, group in zip(layout.groups, groups, strict=True):
        if not group.has_states:
            found |= zip(group.layers, _places(arena, layout, spec), strict=False)  # the last places may be unused
    return dict(sorted(found.items()))


def state_caches(
    arena: torch.Tensor, layout: KvLayout, groups: Sequence[LayerGroup]
) -> dict[int, tuple[torch.Tensor, int]]:
    """Returns per-layer views fp32 [num_blocks, state_bytes / 4] of the block-major arena, with their KV groups."""
    found: dict[int, tuple[torch.Tensor, int]] = {}
    for number, (spec, group) in enumerate(zip(layout.groups, groups, strict=True)):
        if group.has_states:
            used = arena[:, : spec.block_bytes(layout.block_size)].view(torch.float32)
            parts = used.split(spec.state_bytes // 4, dim=1)
            found |= zip(group.layers, ((part, number) for part in parts), strict=False)
    return found


def _places(arena: torch.Tensor, layout: KvLayout, spec: KvSpec) -> list[LayerCache]:
    num_blocks, block_size = arena.shape[0], layout.block_size
    dtype = TORCH_DTYPES[spec.dtype]
    used = arena[:, : spec.block_bytes(block_size)].view(dtype)
    inner = (block_size, spec.num_kv_heads) if layout.order == "slots_first" else (spec.num_kv_heads, block_size)
    kv = used.view(num_blocks, spec.num_layers, 2, *inner, row_width(spec.head_dim, dtype))
    if layout.order == "slots_first":
        kv = kv.transpose(3, 4)
    layers = [(kv[:, layer, 0], kv[:, layer, 1]) for layer in range(spec.num_layers)]
    return [LayerCache(by_word(k) if layout.order == "words_first" else k, v) for k, v in layers]
