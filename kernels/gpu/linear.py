"""A linear layer in Triton whose rows do not depend on each other.

cuBLAS chooses an algorithm, and with it an order of summation, according to the number of rows. Here, the inner
dimension is never split, and its tiles are added in ascending order to one fp32 accumulator. A row therefore has the
same bits in a batch of 1 and in a prompt of 8192, if the matrix instructions of all tiles round alike. On an H100 they
do, for all 15 tiles that `python -m kernels.gpu.tune_linear` times: mma.sync in tiles of 16 rows gives the bits of
wgmma in tiles of 128. `tiles_agree` tests this for the tiles below before they are used. Where they do not agree, every
number of rows takes the tile that depends on the weight's shape alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cpu.selection import count_fallback

_GROUP_M = 8  # row tiles that share a weight tile in L2 before the next one is read
_FULL_GRID = 132  # with fewer programs, tiles are narrower; the number of multiprocessors of an H100 or H200


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a product that one program computes, and the parameters of its launch."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


FEW_ROWS = (Tile(16, 32, 128, 4, 5), Tile(32, 32, 128, 4, 5))
"""Tiles for up to 16 and up to 32 rows, with which an H100 reads a weight as fast as with cuBLAS (in 0.88 to 1.03 of
its time).
"""
WIDE = (Tile(128, 128, 64, 8, 4), Tile(64, 64, 128, 4, 4))
"""Tiles that are used if their programs nearly fill the chip, in this order. 4096 rows take 1.3 to 1.4 times as long as
with cuBLAS.
"""
NARROW = Tile(64, 32, 128, 4, 5)
TILES = (*FEW_ROWS, *WIDE, NARROW)


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


def fixed_tile(out_features: int) -> Tile:
    """Returns the tile for any number of rows where tiles do not agree. With few rows, about one program per
    multiprocessor is needed to keep the memory busy, so the column tile is made narrower until there are that many
    programs, but not below 32 columns.
    """
    columns = 128
    while columns > 32 and out_features < columns * _FULL_GRID:
        columns //= 2
    return Tile(64, columns, 64, 4, 4)


def tile_of(num_rows: int, out_features: int) -> Tile:
    """Returns the fastest tile for a number of rows, among those that give the same bits (`tiles_agree`)."""
    for tile in FEW_ROWS:
        if num_rows <= tile.rows:
            return tile
    for tile in WIDE:
        if 2 * num_rows > tile.rows and _num_programs(tile, num_rows, out_features) >= 0.75 * _FULL_GRID:
            return tile
    return NARROW


def constexprs(tile: Tile, has_bias: bool, wide: bool = False) -> dict[str, Any]:
    """Returns the kernel variant for a tile."""
    blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.inner, "GROUP_M": _GROUP_M}
    return {**blocks, "HAS_BIAS": has_bias, "WIDE": wide}


@functools.cache
def tiles_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether all TILES give the same bits for random inputs of this dtype on this device. If they do not, this
    is logged once and counted. fp32 does not use matrix instructions, and neither does the interpreter, so their tile
    is fixed.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return False
    g = torch.Generator(device).manual_seed(0)
    x, weight = (torch.randn(rows, 4096, device=device, generator=g).to(dtype) for rows in (150, 300))
    first, *others = (linear(x, weight, tile=tile) for tile in TILES)
    if all(torch.equal(first, other) for other in others):
        return True
    count_fallback("linear tile", f"tiles for {dtype} differ in their bits on this GPU", "with one tile for any batch")
    return False


def compile_tiles(weight: Tensor, bias: Tensor | None) -> None:
    """Compiles the kernel for every tile that calls with this weight may use, so that none is compiled later. `weight`
    and `bias` are those of `linear`. Does nothing without a GPU.
    """
    if not weight.is_cuda:
        return
    x = weight.new_zeros(1, weight.shape[1])
    agree = tiles_agree(weight.device, weight.dtype)
    for tile in TILES if agree else (fixed_tile(weight.shape[0]),):
        linear(x, weight, bias, tile=tile)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None) -> Tensor:
    """Returns x @ weight.T + bias, computed in fp32 and rounded once. A row's bits do not depend on the other rows.

    x: [..., in] bf16, fp16 or fp32; weight: [out, in] and bias: [out] in the same dtype. Returns [..., out].
    tile: for measurements; None: the tile that suits the number of rows.
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
    if tile is None:
        agree = tiles_agree(x.device, x.dtype)
        tile = tile_of(rows.shape[0], out_features) if agree else fixed_tile(out_features)
    linear_kernel[(_num_programs(tile, rows.shape[0], out_features),)](
        out, rows, weight, out if bias is None else bias.contiguous(), rows.shape[0], out_features, in_features,
        rows.stride(0), weight.stride(0),
        **constexprs(tile, bias is not None, wide=not x.is_cuda),  # the interpreter's bf16 dot is wrong
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


def _num_programs(tile: Tile, num_rows: int, out_features: int) -> int:
    return int(triton.cdiv(num_rows, tile.rows) * triton.cdiv(out_features, tile.columns))
