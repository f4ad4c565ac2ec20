"""Computes attention over block tables in plain torch, as the reference for the attention kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.kv_cache import dequantize_rows, rows_of


def _gather(cache: Tensor, block_ids: Tensor, context_len: int) -> Tensor:
    """Gathers a sequence's rows of a cache (`kernels.kv_cache`) as fp32 [kv_heads, context_len, head_dim]."""
    rows = rows_of(cache[block_ids.long()]).transpose(0, 1).flatten(1, 2)
    return dequantize_rows(rows[:, :context_len])


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    softmax_scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Maps q [q_len, heads, d], keys, values [kv_heads, ctx, d], visible [q_len, ctx] to fp32 [q_len, heads, d]."""
    q_len, num_heads, head_dim = q.shape
    grouped = q.float().view(q_len, keys.shape[0], -1, head_dim)
    scores = torch.einsum("qhgd,hkd->hgqk", grouped, keys) * softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:  # one more logit per head, whose value is zero
        sink = sinks.float().view(keys.shape[0], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : visible.shape[1]]
    return torch.einsum("hgqk,hkd->qhgd", probabilities, values).reshape(q_len, num_heads, head_dim)


def paged_prefill_reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `paged_prefill` in fp32, one sequence at a time, as the reference."""
    out = torch.zeros_like(q)
    block_size = value_cache.shape[2]
    starts = cu_seqlens_q.tolist()
    for i, context_len in enumerate(context_lens.tolist()):
        begin, end = starts[i], starts[i + 1]
        if context_len == 0 or begin == end:
            continue
        positions = torch.arange(context_len - (end - begin), context_len, device=q.device)
        first = 0 if window is None else max(0, int(positions[0]) - window + 1) // block_size
        blocks = block_table[i, first : -(-context_len // block_size)]
        key_positions = torch.arange(first * block_size, context_len, device=q.device)
        visible = key_positions[None, :] <= positions[:, None]
        if window is not None:
            visible &= key_positions[None, :] > positions[:, None] - window
        num_keys = context_len - first * block_size
        # Slots outside every row's window may contain anything, even NaN, and 0 * NaN is NaN.
        unseen = ~visible.any(0)[None, :, None]
        keys = _gather(key_cache, blocks, num_keys).masked_fill(unseen, 0.0)
        values = _gather(value_cache, blocks, num_keys).masked_fill(unseen, 0.0)
        out[begin:end] = _attend(q[begin:end], keys, values, visible, softmax_scale, softcap, sinks).to(q.dtype)
    return out


def paged_attention_reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes `paged_attention` in fp32, one sequence at a time, as the reference."""
    cu_seqlens_q = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return paged_prefill_reference(
        q, key_cache, value_cache, block_table, context_lens, cu_seqlens_q,
        softmax_scale=softmax_scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
