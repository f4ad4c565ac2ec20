"""Computes attention in decode, with one query per sequence over the sequence's block table.

On the C++ path, results are reproducible: the key axis is divided into KV splits of 256 keys at absolute positions. A
row's reductions inside a split have a fixed order, and splits are merged in ascending order, so a row's bits depend
only on its own query, keys and values (online softmax over split keys: Flash-Decoding, Dao et al. 2023).
`kernels.gpu.attention_kernels` describes the Triton path.
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
    """Computes attention for one query per sequence.

    q: [num_seqs, num_heads, head_dim] bf16 or fp32, last dimension contiguous; head_dim a multiple of 8.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, row_width] of q's dtype, float8_e4m3fn or, on a CPU,
        int8, last dimension contiguous, otherwise any strides. On a CPU, keys may be stored by word
        (`kernels.kv_cache`).
    block_table: int32 [num_seqs, max_blocks]; entries of blocks without a visible key are not read.
    context_lens: int32 [num_seqs], including the current token, whose K and V are already written; 0 gives a row of
        zeros.
    window: the query at position p sees keys p - window + 1 .. p; None: all keys up to p.
    softcap: if given, scores become softcap * tanh(score / softcap) before the softmax (Gemma 2).
    sinks: fp32 [num_heads], if given: one more logit for each head in the softmax, without a value (gpt-oss).
    Returns [num_seqs, num_heads, head_dim] (`out` if given).
    Raises ValueError if shapes or dtypes do not fit, and on the C++ path also if a block id is out of range or a block
        table is too short.
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
