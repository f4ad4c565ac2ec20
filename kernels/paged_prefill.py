"""Causal prefill attention of packed chunks of queries over cached blocks and over the chunks themselves.

On the C++ path, a query gets the same bits as in `paged_attention`.
"""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.attention import attention
from kernels.cpu.loader import on_triton


def paged_prefill(
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
    out: Tensor | None = None,
) -> Tensor:
    """Computes causal attention for a packed batch of chunks.

    q: [total_q, num_heads, head_dim]; sequence i has rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1, which are the
        last of its context_lens[i] positions. Their K and V are already written.
    cu_seqlens_q: int32 [num_seqs + 1].
    On the C++ path a chunk of one query gives the bits of `paged_attention`, so decode rows may be mixed in.
    Everything else, including errors, is as in `paged_attention`. Returns [total_q, num_heads, head_dim].
    """
    if on_triton(q):
        from kernels.gpu import attention as gpu

        where = (key_cache, value_cache, block_table, context_lens, cu_seqlens_q)
        return gpu.paged_prefill(
            q, *where, softmax_scale=softmax_scale, window=window, out=out, softcap=softcap, sinks=sinks
        )
    return attention(
        q, key_cache, value_cache, block_table, context_lens, cu_seqlens_q, softmax_scale, window, softcap, sinks, out
    )
