"""Computes the elementwise halves of SwiGLU and GeGLU in Triton. The contracts are those of `kernels.silu_mul.silu_mul`
and `kernels.gelu_mul.gelu_mul`, which check shapes.

Gate and up are read once, and the product is written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import power_of_2, warps_for

_TILE = 4096  # maximum number of elements of a row that a program computes


@triton.jit
def silu_mul_kernel(out_ptr, x_ptr, width, x_row, TILE: tl.constexpr, GELU: tl.constexpr):
    """Computes one column tile of a row per program. out: [rows, width]; x: [rows, 2 * width], gate then up."""
    tiles = tl.cdiv(width, TILE)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    col = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    mask = col < width
    gate = tl.load(x_ptr + row * x_row + col, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_row + width + col, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    z = wide
    if GELU:  # as in kernels/cpu/layer.cpp
        z = wide * (1.59576912161 + 0.0713548162726 * wide * wide)
    activated = (wide / (1.0 + tl.exp(-z))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * width + col, (activated * up.to(tl.float32)).to(gate.dtype), mask=mask)


def tile_for(width: int) -> int:
    return min(_TILE, power_of_2(width))


def silu_mul(x: Tensor) -> Tensor:
    """Implements the contract of `kernels.silu_mul.silu_mul`; rows may be strided."""
    return _gate_mul(x, gelu=False)


def gelu_mul(x: Tensor) -> Tensor:
    """Implements the contract of `kernels.gelu_mul.gelu_mul`; rows may be strided."""
    return _gate_mul(x, gelu=True)


def _gate_mul(x: Tensor, *, gelu: bool) -> Tensor:
    width = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = x.reshape(-1, 2 * width)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    tile = tile_for(width)
    silu_mul_kernel[(rows.shape[0] * triton.cdiv(width, tile),)](
        out, rows, width, rows.stride(0), TILE=tile, GELU=gelu, num_warps=warps_for(tile)
    )
    return out
