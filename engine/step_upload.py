"""Sends the arrays of a step to the device, and prepares the attention providers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.device import Device
from engine.models.attention import GroupStep, StepMetadata
from engine.step import StepInput
from kernels.providers.base import AttentionBatch, AttentionProvider, HostBatch


def upload(
    batch: StepInput,
    device: Device,
    attention: AttentionProvider,
    by_layer: Mapping[int, tuple[AttentionProvider, int]],
    states: Mapping[int, tuple[torch.Tensor, int]],
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, StepMetadata]:
    """Returns a step's token ids [T], the indices of its requested rows [R], and its metadata. `by_layer` maps each
    attention layer to a provider and a KV group; if it is empty, `attention` serves all layers. `states` maps each
    layer with a recurrent state to a view of the arena and a KV group.
    """
    num_groups = len(batch.block_tables)
    tokens, positions, starts, lens, rows, *of_groups = device.upload(
        [batch.token_ids, batch.positions, batch.cu_seqlens_q, batch.context_lens, batch.logits_rows,
         *batch.slot_mappings, *batch.block_tables]
    )  # fmt: skip
    decode_only = len(batch.token_ids) == len(batch.context_lens)
    steps = []
    for slots, table, on_host in zip(of_groups[:num_groups], of_groups[num_groups:], batch.block_tables, strict=True):
        host = HostBatch(batch.cu_seqlens_q, batch.context_lens, on_host)
        steps.append(GroupStep(slots, AttentionBatch(starts, lens, table, host, decode_only)))
    others = () if states else ((attention, 0),)
    for provider, group in dict.fromkeys(by_layer.values()) or others:
        provider.prepare(steps[group].batch)
    layers = {layer: (provider, steps[group]) for layer, (provider, group) in by_layer.items()}
    of_states = {layer: (view, steps[group]) for layer, (view, group) in states.items()}
    metadata = StepMetadata(positions, steps[0], attention, layers, of_states, block_size)
    return tokens, rows, metadata
