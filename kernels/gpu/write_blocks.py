"""Rotates q and k (RoPE) and writes k and v into slots, in one launch. The contract is that of
`kernels.write_blocks.write_blocks`.

One program handles one token and a few heads of q, or of k and v. Slots and positions are on the device, so the host
does not check them. For a slot past the cache, k and v are not written. A position past the table turns the rotated
dimensions of the token's q and k into NaN. The compiler must not fuse a multiplication and an addition, so that the
rotation rounds as in the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import power_of_2

_HEADS = 8  # per program: 2 KiB of q or 4 KiB of k and v at head dim 128; 5 programs per token for Llama-3-8B
FP8_MAX = tl.constexpr(448.0)  # largest finite float8_e4m3fn


@triton.jit
def _store(at, x, mask, scale, SCALED: tl.constexpr):
    """Stores x. For an fp8 cache, x is divided by the scale, saturated and rounded once. NaN stays NaN."""
    if SCALED:
        x = tl.div_rn(x.to(tl.float32), tl.zeros_like(x.to(tl.float32)) + scale)
        x = tl.where(x > FP8_MAX, FP8_MAX, tl.where(x < -FP8_MAX, -FP8_MAX, x))
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _turned(src, head_mask, cos_sin, known, HALF: tl.constexpr, COLS: tl.constexpr):
    """Returns the two rotated halves in fp32, each [heads, COLS]. src: [heads, 1] pointers to the first dimension."""
    i = tl.arange(0, COLS)[None, :]
    mask = head_mask & (i < HALF)
    cos = tl.load(cos_sin + i, mask=(i < HALF) & known, other=float("nan"))
    sin = tl.load(cos_sin + HALF + i, mask=(i < HALF) & known, other=float("nan"))
    a = tl.load(src + i, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(src + HALF + i, mask=mask, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _copy(
    dst, src, head_mask, scale, FIRST: tl.constexpr, LAST: tl.constexpr, COLS: tl.constexpr, SCALED: tl.constexpr
):
    """Copies dimensions FIRST to LAST without rotation. dst, src: [heads, 1] pointers to the first dimension."""
    i = FIRST + tl.arange(0, COLS)[None, :]
    mask = head_mask & (i < LAST)
    _store(dst + i, tl.load(src + i, mask=mask, other=0.0), mask, scale, SCALED)


@triton.jit
def _rotate(
    dst, src, head_mask, cos_sin, known, scale,
    HALF: tl.constexpr, HALF_COLS: tl.constexpr, DIM: tl.constexpr, REST_COLS: tl.constexpr,
    IN_PLACE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rotates src into dst, rounding once. Dimensions from 2 * HALF on are not rotated. dst may be src (IN_PLACE)."""
    a, b = _turned(src, head_mask, cos_sin, known, HALF, HALF_COLS)
    if IN_PLACE:
        tl.debug_barrier()  # several threads may read the same element, and all must read before one writes
    i = tl.arange(0, HALF_COLS)[None, :]
    mask = head_mask & (i < HALF)
    _store(dst + i, a, mask, scale, SCALED)
    _store(dst + HALF + i, b, mask, scale, SCALED)
    if not IN_PLACE and 2 * HALF < DIM:
        _copy(dst, src, head_mask, scale, 2 * HALF, DIM, REST_COLS, SCALED)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def write_blocks_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, slots_ptr, key_ptr, value_ptr, cos_sin_ptr,
    num_heads, num_kv_heads, num_slots, block_size, max_pos, k_scale, v_scale,
    q_token, q_head, k_token, k_head, v_token, v_head,
    key_block, key_head, key_slot, value_block, value_head, value_slot,
    Q_GROUPS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_COLS: tl.constexpr,
    HALF: tl.constexpr, HALF_COLS: tl.constexpr, REST_COLS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rotates q, and writes k and v. The grid is (tokens, groups). The first Q_GROUPS groups rotate HEADS heads of q
    each; the remaining groups write k and v.
    """
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.arange(0, HEADS)[:, None]
    known, cos_sin = True, cos_sin_ptr
    if HALF > 0:
        position = tl.load(positions_ptr + token)
        known = (position >= 0) & (position < max_pos)
        cos_sin = cos_sin_ptr + position * (2 * HALF)
    if group < Q_GROUPS:
        head += group * HEADS
        q = q_ptr + token * q_token + head.to(tl.int64) * q_head
        _rotate(q, q, head < num_heads, cos_sin, known, 1.0, HALF, HALF_COLS, DIM, REST_COLS, True, False)
    else:
        head += (group - Q_GROUPS) * HEADS
        mask = head < num_kv_heads
        slot = tl.load(slots_ptr + token)
        if (slot >= 0) & (slot < num_slots):
            block, offset = slot // block_size, slot % block_size
            k = k_ptr + token * k_token + head.to(tl.int64) * k_head
            v = v_ptr + token * v_token + head.to(tl.int64) * v_head
            key = key_ptr + block * key_block + offset * key_slot + head.to(tl.int64) * key_head
            value = value_ptr + block * value_block + offset * value_slot + head.to(tl.int64) * value_head
            if HALF > 0:
                _rotate(key, k, mask, cos_sin, known, k_scale, HALF, HALF_COLS, DIM, REST_COLS, False, SCALED)
            else:
                _copy(key, k, mask, k_scale, 0, DIM, DIM_COLS, SCALED)
            _copy(value, v, mask, v_scale, 0, DIM, DIM_COLS, SCALED)


def constexprs(num_heads: int, head_dim: int, rotary_dim: int, scaled: bool) -> dict[str, Any]:
    """Returns the kernel variant for a model. If rotary_dim is 0, nothing is rotated, and q is not written."""
    half = rotary_dim // 2
    return {
        "Q_GROUPS": triton.cdiv(num_heads, _HEADS) if half else 0, "HEADS": _HEADS,
        "DIM": head_dim, "DIM_COLS": power_of_2(head_dim),
        "HALF": half, "HALF_COLS": power_of_2(half), "REST_COLS": power_of_2(head_dim - 2 * half), "SCALED": scaled,
    }  # fmt: skip


def warps(variant: dict[str, Any]) -> int:
    """Returns the number of warps of a launch. Each thread processes eight elements (16 bytes) of the smaller tiles."""
    cols = variant["HALF_COLS"] if variant["HALF"] else variant["DIM_COLS"]
    return max(1, _HEADS * cols // 256)


def write_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cos_sin: Tensor | None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Implements the contract of `kernels.write_blocks.write_blocks`, with scales for float8_e4m3fn caches.

    An fp8 cache contains x / scale, saturated to +-448 and rounded once from the rotated fp32 value; it needs sm_89 or
    later. The scales are ignored for other caches. Raises ValueError if a last dimension is not contiguous.
    """
    if any(t.stride(-1) != 1 for t in (q, k, v, key_cache, value_cache)):
        raise ValueError("the last dimension must be contiguous")
    num_blocks, num_kv_heads, block_size, head_dim = key_cache.shape
    table = q.new_empty((0, 0)) if cos_sin is None else cos_sin.contiguous()
    scaled = key_cache.dtype == torch.float8_e4m3fn
    variant = constexprs(q.shape[1], head_dim, table.shape[1], scaled)
    if q.shape[0] == 0:
        return
    write_blocks_kernel[(q.shape[0], variant["Q_GROUPS"] + triton.cdiv(num_kv_heads, _HEADS))](
        q, k, v, positions.contiguous(), slot_mapping.contiguous(), key_cache, value_cache, table,
        q.shape[1], num_kv_heads, num_blocks * block_size, block_size, table.shape[0], k_scale, v_scale,
        *(t.stride(dim) for t in (q, k, v) for dim in (0, 1)),
        *(t.stride(dim) for t in (key_cache, value_cache) for dim in (0, 1, 2)),
        **variant, num_warps=warps(variant), enable_fp_fusion=False,
    )  # fmt: skip
