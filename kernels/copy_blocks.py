"""Copies batches of blocks, for copy-on-write, swapping and transfer. A block is a row of bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.loader import current, on_triton
from kernels.cpu.selection import count_fallback


def copy_blocks_reference(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Computes `copy_blocks` in plain torch, as the reference."""
    for ids, arena in ((src_ids, src), (dst_ids, dst)):
        if bool(((ids < 0) | (ids >= arena.shape[0])).any()):
            raise ValueError("a block id is out of range")
    dst[dst_ids] = src[src_ids].to(dst.device)


def copy_blocks(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    """Copies block src_ids[i] of `src` to block dst_ids[i] of `dst` for all i.

    src, dst: uint8 [num_blocks, block_bytes], rows contiguous. They may be the same arena if no block is both source
    and target. One may be on a GPU and the other in host memory. src_ids, dst_ids: int64 [n], preferably in host
    memory; no target occurs twice.
    Raises ValueError, without copying anything, if shapes or dtypes do not fit or an id is out of range. The Triton
    path does not check ids that are on a GPU, and skips pairs of them that are out of range.
    """
    if not (src.dtype == dst.dtype == torch.uint8 and src.dim() == dst.dim() == 2 and src.shape[1] == dst.shape[1]):
        raise ValueError("src and dst must be uint8 [num_blocks, block_bytes] with blocks of one size")
    if not (src_ids.dtype == dst_ids.dtype == torch.int64 and src_ids.shape == dst_ids.shape and src_ids.dim() == 1):
        raise ValueError("src_ids and dst_ids must be int64 [n]")
    if on_triton(src) or on_triton(dst):
        from kernels.gpu import copy_blocks as gpu

        gpu.copy_blocks(src, dst, src_ids, dst_ids)
        return
    library = current()
    on_cpu = src.device.type == dst.device.type == "cpu"
    if library.handle is None or not on_cpu or src.stride(1) != 1 or dst.stride(1) != 1:
        if library.isa != "reference":
            count_fallback("copy_blocks", f"no fast path from {src.device.type} to {dst.device.type}, or rows strided")
        copy_blocks_reference(src, dst, src_ids, dst_ids)
        return
    torch.ops.looseleaf.copy_blocks(src, dst, src_ids, dst_ids)
