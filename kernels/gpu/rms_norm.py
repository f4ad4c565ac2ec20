"""Computes the RMS norm in Triton, optionally after adding a residual. The contract is that of
`kernels.rms_norm.rms_norm`, which checks shapes.

A whole row is in one tile, whose shape depends only on the row's width, so the bits of a row's result depend only on
the row.
"""

from __future__ import annotations

from typing import Any, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import power_of_2, warps_for

_TILE = 1024  # elements; narrower rows (heads, for QK norm) share a program


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    out_ptr,  # [num_rows, WIDTH]
    summed_ptr,  # [num_rows, WIDTH], if there is a residual
    x_ptr,  # [num_rows / heads, heads, WIDTH]
    residual_ptr,  # like x, but with different strides
    weight_ptr,  # [WIDTH]
    num_rows,
    heads,
    eps,
    x_outer,
    x_head,
    residual_outer,
    residual_head,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    mask = (row < num_rows) & (col < WIDTH)
    outer, head = row // heads, row % heads
    x = tl.load(x_ptr + outer * x_outer + head * x_head + col, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + outer * residual_outer + head * residual_head + col, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(summed_ptr + row * WIDTH + col, x, mask=mask)
    wide = x.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / WIDTH
    inverse = 1.0 / tl.sqrt(mean + eps)
    weight = tl.load(weight_ptr + col, mask=col < WIDTH, other=0.0)
    normed = wide * inverse[:, None]
    if weight.dtype != tl.float32:  # rounded before it is multiplied
        normed = normed.to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + col, (normed * weight.to(tl.float32)).to(x.dtype), mask=mask)


def _as_heads(x: Tensor) -> Tensor:
    """Reshapes [..., width] to [outer, heads, width], as a view if possible; heads is 1 unless x has three
    dimensions.
    """
    width = x.shape[-1]
    if x.dim() == 3:
        return x if x.stride(-1) == 1 else x.contiguous()
    rows = x.reshape(-1, width)
    return (rows if rows.stride(-1) == 1 else rows.contiguous())[:, None]


def constexprs(width: int, has_residual: bool) -> dict[str, Any]:
    """Returns the kernel variant for rows of this width, without `num_warps`."""
    cols = power_of_2(width)
    return {"WIDTH": width, "ROWS": max(1, _TILE // cols), "COLS": cols, "HAS_RESIDUAL": has_residual}


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the contract of `kernels.rms_norm.rms_norm`. x and residual may be strided views with up to 3
    dimensions.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = out if residual is None else torch.empty_like(out)
    rows = _as_heads(x)
    more = rows if residual is None else _as_heads(residual)
    num_rows, heads = rows.shape[0] * rows.shape[1], rows.shape[1]
    if num_rows and x.shape[-1]:
        variant = constexprs(x.shape[-1], residual is not None)
        rms_norm_kernel[(triton.cdiv(num_rows, variant["ROWS"]),)](
            out, summed, rows, more, weight.contiguous(), num_rows, heads, eps,
            rows.stride(0), rows.stride(1), more.stride(0), more.stride(1),
            **variant, num_warps=warps_for(variant["ROWS"] * variant["COLS"]),
        )  # fmt: skip
    return out if residual is None else (out, summed)
