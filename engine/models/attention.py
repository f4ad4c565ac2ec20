"""Computes a layer's attention. This rotates q and k, writes K and V to their slots, and attends to the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from engine.lora import LoraStep
from kernels.linear import PackedLinear
from kernels.providers.base import AttentionBatch, AttentionProvider
from kernels.row_parallel import RowParallelLinear
from kernels.write_blocks import write_blocks

Projection = PackedLinear | RowParallelLinear


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The part of a step that concerns one KV group, namely the slots that its layers write and the blocks that they
    read.
    """

    slot_mapping: torch.Tensor  # int64 [T], block * block_size + offset; negative: not written
    batch: AttentionBatch


@dataclass(slots=True)
class StepMetadata:
    """The data of a step that layers need, for T tokens of B sequences, and the attention providers of the layers."""

    positions: torch.Tensor  # int64 [T]
    group: GroupStep  # that of the first KV group
    attention: AttentionProvider
    by_layer: Mapping[int, tuple[AttentionProvider, GroupStep]] = field(default_factory=dict)
    """One entry for each attention layer. Empty for a native model whose layers all use `attention` and `group`."""
    states: Mapping[int, tuple[torch.Tensor, GroupStep]] = field(default_factory=dict)
    """For each layer with a recurrent state, its view of the arena (fp32 [num_blocks, numbers of a state], strided),
    and the part of the step that concerns its KV group.
    """
    block_size: int = 0
    lora: LoraStep | None = None
    """The adapters of the step; None if no sequence has one."""

    def linear(self, linear: Projection, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of a linear layer for x [T, in], with the corrections of adapters."""
        return self._corrected(linear, x, of_rows=False)

    def linear_of_rows(self, linear: Projection, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of a linear layer, including the corrections of adapters, for x [R, in], which contains
        only the requested rows.
        """
        return self._corrected(linear, x, of_rows=True)

    def _corrected(self, linear: Projection, x: torch.Tensor, *, of_rows: bool) -> torch.Tensor:
        out = linear(x)
        if self.lora is not None and len(x):
            self.lora.correct(linear, x, out, of_rows)
        return out

    def of_layer(self, layer: int) -> tuple[AttentionProvider, GroupStep]:
        """Returns the provider of a layer's attention, and the slots and blocks that the layer uses."""
        return self.by_layer.get(layer) or (self.attention, self.group)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A view of one layer's keys and values in the arena."""

    keys: torch.Tensor  # as values, or stored by word (kernels.kv_cache)
    values: torch.Tensor  # [num_blocks, kv_heads, block_size, row_width], strided

    def of_heads(self, heads: slice) -> LayerCache:
        """Returns the view of some KV heads."""
        return LayerCache(self.keys[:, heads], self.values[:, heads])


@dataclass(frozen=True, slots=True)
class Attention:
    """The sizes of a layer's attention, which has no parameters."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns views of the fused projection [T, (H + 2 KVH) * D] as q [T, H, D], k and v [T, KVH, D]."""
        heads = qkv.view(qkv.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        keys_at, values_at = self.num_heads, self.num_heads + self.num_kv_heads
        return heads[:, :keys_at], heads[:, keys_at:values_at], heads[:, values_at:]

    def __call__(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: LayerCache,
        step: StepMetadata,
        layer: int,
        cos_sin: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes the step's K and V, and returns the attention [T, H * D] over the K and V in the blocks. If `cos_sin`
        is given, q is rotated in place.
        """
        q, k, v = qkv
        provider, group = step.of_layer(layer)
        write_blocks(q, k, v, step.positions, group.slot_mapping, cache.keys, cache.values, cos_sin)
        attend = provider.decode if group.batch.decode_only else provider.prefill
        out = attend(q, cache.keys, cache.values, group.batch)
        return out.view(q.shape[0], self.num_heads * self.head_dim)
