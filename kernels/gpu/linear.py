"""A linear layer in Triton whose rows do not depend on each other.

cuBLAS chooses an algorithm, and with it an order of summation, according to the number of rows. Here, the tile depends
only on the weight's shape, the inner dimension is never split, and its tiles are added in ascending order to one fp32
accumulator. A row therefore has the same bits in a batch of 1 and in a prompt of 8192. As a consequence, a decode step
computes at least _BLOCK_M rows. This code has not run on a GPU yet, so neither the cost nor the equality of bits has
been measured.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_M = 64  # rows of one wgmma on sm_90, or of four mma.sync on sm_80
_BLOCK_K = 64
_GROUP_M = 8  # row tiles that share a weight tile in L2 before the next one is read
_FULL_GRID = 132  # with fewer programs, tiles are narrower; the number of multiprocessors of an H100 or H200
NUM_WARPS, NUM_STAGES = 4, 4


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    out_ptr,  # [num_rows, out_features]
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [out_features, in_features]
    bias_ptr,  # [out_features], if there is a bias
    num_rows,
    out_features,
    in_features,
    x_row,
    weight_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    group_len = min(tiles_m - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    row = (group * GROUP_M + within % group_len) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (within // group_len) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_mask, col_mask = (row < num_rows)[:, None], (col < out_features)[None, :]
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_row + k[None, :]  # [BLOCK_M, BLOCK_K]
    weight_at = weight_ptr + col.to(tl.int64)[None, :] * weight_row + k[:, None]  # [BLOCK_K, BLOCK_N]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        inside = start + k < in_features
        x = tl.load(x_at + start, mask=row_mask & inside[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=inside[:, None] & col_mask, other=0.0)
        if WIDE:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + col, mask=col < out_features, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row.to(tl.int64)[:, None] * out_features + col[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=row_mask & col_mask)


def constexprs(out_features: int, has_bias: bool, wide: bool = False) -> dict[str, Any]:
    """Returns the kernel variant for a weight. With few rows, about one program per multiprocessor is needed to keep
    the memory busy, so the column tile is made narrower until there are that many programs, but not below 32 columns.
    """
    block_n = 128
    while block_n > 32 and out_features < block_n * _FULL_GRID:
        block_n //= 2
    tile = {"BLOCK_M": _BLOCK_M, "BLOCK_N": block_n, "BLOCK_K": _BLOCK_K, "GROUP_M": _GROUP_M}
    return {**tile, "HAS_BIAS": has_bias, "WIDE": wide}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x @ weight.T + bias, computed in fp32 and rounded once. A row's bits do not depend on the other rows.

    x: [..., in] bf16, fp16 or fp32; weight: [out, in] and bias: [out] in the same dtype. Returns [..., out].
    Raises ValueError if shapes or dtypes do not fit.
    """
    out_features, in_features = weight.shape
    if x.shape[-1] != in_features or not x.dtype == weight.dtype == (weight if bias is None else bias).dtype:
        raise ValueError("x [..., in], weight [out, in] and bias must fit and have the same dtype")
    out = torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, in_features)
    rows, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (rows, weight))
    variant = constexprs(out_features, bias is not None, wide=not x.is_cuda)  # the interpreter's bf16 dot is wrong
    grid = (triton.cdiv(rows.shape[0], _BLOCK_M) * triton.cdiv(out_features, variant["BLOCK_N"]),)
    linear_kernel[grid](
        out, rows, weight, out if bias is None else bias.contiguous(), rows.shape[0], out_features, in_features,
        rows.stride(0), weight.stride(0), **variant, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
