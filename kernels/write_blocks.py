"""Rotates q and k (RoPE) and writes k and v into their slots, in one pass.

The rotation is the rotate-half (NeoX) form that Hugging Face's Llama uses. It is computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.loader import current, on_triton
from kernels.cpu.selection import count_fallback
from kernels.kv_cache import EIGHT_BITS, WORD_BYTES, check_keys, head_dim_of, is_by_word, quantize_rows


def _rotate(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Returns x [T, heads, head_dim] rotated, in its dtype. Dimensions past the width of `cos_sin` are not changed."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[positions.long()][:, None, :].split(half, dim=-1)  # [T, 1, half]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1)


def write_blocks_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cos_sin: Tensor | None,
) -> None:
    """Computes `write_blocks` in plain torch, as the reference."""
    if cos_sin is not None:
        q.copy_(_rotate(q, positions, cos_sin))
        k = _rotate(k.float() if key_cache.dtype in EIGHT_BITS else k, positions, cos_sin)  # rounded once
    kept = slot_mapping >= 0
    slots, block_size = slot_mapping[kept], value_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    rows = quantize_rows(k[kept], key_cache.dtype)
    if is_by_word(key_cache):
        key_cache[blocks, :, :, offsets] = rows.unflatten(2, (-1, WORD_BYTES // rows.element_size()))
    else:
        key_cache[blocks, :, offsets] = rows
    value_cache[blocks, :, offsets] = quantize_rows(v[kept], value_cache.dtype)


def write_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cos_sin: Tensor | None,
) -> None:
    """Rotates q in place, and writes the rotated k, and v, to the caches. k itself is not changed.

    q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim]; may be strided views of a fused qkv output.
    positions: int64 [T].
    slot_mapping: int64 [T] = block * block_size + offset; for a negative slot, k and v are not written.
    key_cache, value_cache: [num_blocks, num_kv_heads, block_size, row_width], strided, of q's dtype or float8_e4m3fn,
        on a CPU also int8. On a CPU, keys may be stored by word (`kernels.kv_cache`). Rotated numbers are rounded once.
    cos_sin: fp32 [max_pos, rotary_dim] = cos[:rotary_dim / 2] then sin, rotary_dim <= head_dim; None: no rotation.
    Raises ValueError if shapes or dtypes do not fit. The C++ path also raises it for a slot or position out of range,
    before anything is written.
    """
    triton = on_triton(q)
    cache_dtypes = (q.dtype, torch.float8_e4m3fn) if triton else (q.dtype, *EIGHT_BITS)
    if not (q.dtype == k.dtype == v.dtype and key_cache.dtype == value_cache.dtype in cache_dtypes):
        raise ValueError("q, k, v and the caches differ in dtype")
    if not (positions.dtype == slot_mapping.dtype == torch.int64 and positions.shape == slot_mapping.shape):
        raise ValueError("positions and slot_mapping must be int64 [T]")
    if not q.shape[0] == k.shape[0] == v.shape[0] == positions.shape[0]:
        raise ValueError("q, k, v and positions differ in the number of tokens")
    check_keys(key_cache, value_cache)
    heads, head_dim = value_cache.shape[1], head_dim_of(value_cache)
    if k.shape != v.shape or k.shape[1:] != (heads, head_dim) or q.shape[2] != k.shape[2]:
        raise ValueError("k, v [T, kv_heads, head_dim] do not fit the caches")
    if cos_sin is not None and (cos_sin.dtype != torch.float32 or cos_sin.shape[1] > q.shape[2]):
        raise ValueError("cos_sin must be fp32 [max_pos, rotary_dim <= head_dim]")
    if triton:
        from kernels.gpu import write_blocks as gpu

        gpu.write_blocks(q, k, v, positions, slot_mapping, key_cache, value_cache, cos_sin)
        return
    library = current()
    if library.handle is None or q.device.type != "cpu" or q.dtype not in (torch.bfloat16, torch.float32):
        if library.isa != "reference":
            count_fallback("write_blocks", f"no fast path for {q.dtype} on {q.device.type}")
        write_blocks_reference(q, k, v, positions, slot_mapping, key_cache, value_cache, cos_sin)
        return
    torch.ops.looseleaf.write_blocks(q, k, v, positions, slot_mapping, key_cache, value_cache, cos_sin)
