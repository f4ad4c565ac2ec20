"""Checks the arguments of attention, and calls the C++ operator or the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_reference import paged_attention_reference, paged_prefill_reference
from kernels.cpu.loader import current
from kernels.cpu.selection import count_fallback
from kernels.kv_cache import EIGHT_BITS, check_keys, head_dim_of


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _check_shapes(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor, softmax_scale: float
) -> None:
    _check(q.dim() == 3 and value_cache.dim() == 4, "q must be [rows, heads, d], value_cache [blocks, heads, slots, d]")
    check_keys(key_cache, value_cache)
    fits = key_cache.dtype == value_cache.dtype in (q.dtype, *EIGHT_BITS)
    _check(fits, "the caches' dtype must be q's or one of 8 bits")
    _check(q.shape[2] == head_dim_of(value_cache) and q.shape[2] % 8 == 0, "head_dim must match and be a multiple of 8")
    _check(key_cache.shape[1] > 0 and q.shape[1] % key_cache.shape[1] == 0, "num_heads must be a multiple of kv heads")
    _check(block_table.dtype == context_lens.dtype == torch.int32, "block_table and context_lens must be int32")
    _check(block_table.dim() == 2 and block_table.shape[0] == context_lens.shape[0], "one block table row per sequence")
    _check(softmax_scale > 0, "softmax_scale must be positive")


def attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    softmax_scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """Computes `paged_prefill`, or `paged_attention` if `cu_seqlens_q` is None, with the C++ operator or the
    reference. Raises ValueError if an argument does not fit.
    """
    _check_shapes(q, key_cache, value_cache, block_table, context_lens, softmax_scale)
    _check(window is None or window > 0, "window must be positive")
    _check(softcap is None or softcap > 0, "softcap must be positive")
    fits = sinks is None or (sinks.dtype == torch.float32 and sinks.shape == q.shape[1:2] and sinks.is_contiguous())
    _check(fits, "sinks must be fp32 [num_heads]")
    num_seqs = context_lens.shape[0]
    if cu_seqlens_q is None:
        _check(q.shape[0] == num_seqs, "decode takes one query per sequence")
    else:
        fits = cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.shape == (num_seqs + 1,)
        _check(fits, "cu_seqlens_q must be int32 [num_seqs + 1]")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _check(out.shape == q.shape and out.dtype == q.dtype and out.stride(-1) == 1, "out must be like q")
    library = current()
    if library.handle is None or q.device.type != "cpu" or q.dtype not in (torch.bfloat16, torch.float32):
        if library.isa != "reference":
            count_fallback("attention", f"no fast path for {q.dtype} on {q.device.type}")
        return _reference(
            q,
            key_cache,
            value_cache,
            block_table,
            context_lens,
            cu_seqlens_q,
            softmax_scale,
            window,
            softcap,
            sinks,
            out,
        )
    torch.ops.looseleaf.attention(
        out, q, key_cache, value_cache, block_table, context_lens, cu_seqlens_q, softmax_scale, window or 0,
        softcap or 0.0, sinks,
    )  # fmt: skip
    return out


def _reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    softmax_scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> Tensor:
    how = {"softmax_scale": softmax_scale, "window": window, "softcap": softcap, "sinks": sinks}
    where = (q, key_cache, value_cache, block_table, context_lens)
    if cu_seqlens_q is None:
        return out.copy_(paged_attention_reference(*where, **how))
    return out.copy_(paged_prefill_reference(*where, cu_seqlens_q, **how))
