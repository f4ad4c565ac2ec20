"""Decode attention: one query per sequence over its block table. Independent of layers and of who owns a block.

Reproducibility: the key axis is cut into pieces of 256 at absolute positions; a row's reductions inside a piece run in
a fixed order and pieces merge in ascending order, so a row's bits depend on its own query, keys and values only
(online softmax over split keys: Flash-Decoding, Dao et al. 2023).
"""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.attention import attention
from kernels.cpu.loader import on_triton


def paged_attention(
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
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one query per sequence.

    q: [num_seqs, num_heads, head_dim] bf16 or fp32, last dimension contiguous; head_dim a multiple of 8.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], any strides with a contiguous last one.
    block_table: int32 [num_seqs, max_blocks]; entries that no visible key lies in are not read.
    context_lens: int32 [num_seqs], with the current token, whose K and V are already written; 0 gives a row of zeros.
    window: the query at position p sees keys p - window + 1 .. p; None for all keys up to p.
    softcap: scores become softcap * tanh(score / softcap) before the softmax (Gemma 2); None: they stay.
    sinks: fp32 [num_heads], one more logit a head in the softmax that has no value (gpt-oss); None: none.
    Returns [num_seqs, num_heads, head_dim] (`out` if given).
    Errors: ValueError for shapes, dtypes or block ids that do not fit.
    """
    if on_triton(q):
        from kernels.gpu import attention as gpu

        where = (key_cache, value_cache, block_table, context_lens)
        return gpu.paged_attention(
            q, *where, softmax_scale=softmax_scale, window=window, out=out, softcap=softcap, sinks=sinks
        )
    return attention(
        q, key_cache, value_cache, block_table, context_lens, None, softmax_scale, window, softcap, sinks, out
    )
