"""Copies batches of blocks on a device, and between a device and the host. The contract is that of
`kernels.copy_blocks.copy_blocks`.

Within a device, one launch copies any number of blocks, in 16-byte words if alignment allows it. Copies from an arena
into a packed buffer and back (gather, scatter) work in the same way, but without ids for the buffer. Between device and
host, the copy engines copy blocks of 28 KiB and more (vLLM's crossover on an H100; not measured here), small numbers of
blocks, and memory that is not pinned. The kernel copies other blocks, and accesses the pinned memory over the bus.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.launch import power_of_2, warps_for

_TILE_BYTES = 1 << 15  # per program; with 8 warps, each thread has eight 16-byte words in flight
_ENGINE_BYTES = 28 * 1024
_FEW_BLOCKS = 16  # for fewer blocks, the copy engines are faster at any size


@triton.jit(do_not_specialize=["num_dst", "num_src"], do_not_specialize_on_alignment=["dst_ids_ptr", "src_ids_ptr"])
def copy_blocks_kernel(
    dst_ptr,  # words; rows dst_row * UNIT apart
    src_ptr,
    dst_ids_ptr,  # int64 [n]
    src_ids_ptr,
    num_dst,
    num_src,
    units,  # per block; a unit is UNIT words
    dst_row,
    src_row,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_DST_IDS: tl.constexpr,
    HAS_SRC_IDS: tl.constexpr,
):
    """Copies one tile of a pair of blocks per program. Skips a pair if an id is out of range."""
    tiles = tl.cdiv(units * UNIT, TILE)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    word = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    src = tl.load(src_ids_ptr + pair) if HAS_SRC_IDS else pair
    dst = tl.load(dst_ids_ptr + pair) if HAS_DST_IDS else pair
    mask = word < units * UNIT
    if (src >= 0) & (src < num_src) & (dst >= 0) & (dst < num_dst):
        x = tl.load(src_ptr + src * src_row * UNIT + word, mask=mask)
        tl.store(dst_ptr + dst * dst_row * UNIT + word, x, mask=mask)


def _unit_bytes(*arenas: Tensor) -> int:
    """Returns 16 if every block of all arenas starts and ends at a multiple of 16 bytes, else 1."""
    edges = [edge for a in arenas for edge in (a.data_ptr(), a.stride(0), a.shape[1])]
    return 16 if all(edge % 16 == 0 for edge in edges) else 1


def constexprs(block_bytes: int, unit_bytes: int) -> dict[str, Any]:
    """Returns the kernel variant for blocks of this size. A 16-byte unit is four int32 words; any other unit is one
    byte.
    """
    words = block_bytes // 4 if unit_bytes == 16 else block_bytes
    return {"UNIT": 4 if unit_bytes == 16 else 1, "TILE": min(_TILE_BYTES // 4, power_of_2(words))}


def warps(variant: dict[str, Any]) -> int:
    """Returns the number of warps of a launch, with eight units per thread."""
    return warps_for(variant["TILE"] * 2 // variant["UNIT"])


def copy_within(src: Tensor, dst: Tensor, src_ids: Tensor | None, dst_ids: Tensor | None, n: int) -> None:
    """Copies n pairs in one launch on the device of the ids. Skips pairs with an id out of range."""
    unit_bytes, block_bytes = _unit_bytes(src, dst), src.shape[1]
    variant = constexprs(block_bytes, unit_bytes)
    words = torch.int32 if unit_bytes == 16 else torch.uint8
    unused = src_ids if dst_ids is None else dst_ids
    tiles = triton.cdiv(block_bytes // unit_bytes * variant["UNIT"], variant["TILE"])
    copy_blocks_kernel[(n * tiles,)](
        dst.view(words), src.view(words),
        unused if dst_ids is None else dst_ids, unused if src_ids is None else src_ids,
        dst.shape[0], src.shape[0], block_bytes // unit_bytes,
        dst.stride(0) // unit_bytes, src.stride(0) // unit_bytes,
        **variant, HAS_DST_IDS=dst_ids is not None, HAS_SRC_IDS=src_ids is not None,
        num_warps=warps(variant),
    )  # fmt: skip


def copy_each(src: Tensor, dst: Tensor, src_ids: Tensor | None, dst_ids: Tensor | None) -> None:
    """Issues one asynchronous copy per block. If the ids are on a device, waits for them. Pinned memory must not change
    until the copy in the current stream is complete.
    """
    src_at, dst_at = (None if ids is None else ids.tolist() for ids in (src_ids, dst_ids))
    for i in range(len(src_at if src_at is not None else dst_at or ())):
        source, target = (i if at is None else at[i] for at in (src_at, dst_at))
        dst[target].copy_(src[source], non_blocking=True)


def uses_engines(src: Tensor, dst: Tensor, n: int) -> bool:
    """Returns whether to copy n blocks with the copy engines. This is so for copies between host and device, unless the
    blocks are many and small and the host memory is pinned.
    """
    if src.is_cuda == dst.is_cuda:
        return False
    host = dst if src.is_cuda else src
    return n < _FEW_BLOCKS or src.shape[1] >= _ENGINE_BYTES or not host.is_pinned()


def copy_blocks(src: Tensor, dst: Tensor, src_ids: Tensor | None, dst_ids: Tensor | None) -> None:
    """Copies blocks under the contract of `kernels.copy_blocks.copy_blocks`. In addition, ids of None mean 0, 1, 2, ...
    (gather, scatter).

    src, dst: each on one CUDA device or on the host, pinned if the copy is to run concurrently with other work. Ids on
    the host are checked; ids on the device are not, and the kernel skips pairs out of range. The current stream orders
    the copies. Raises ValueError if a host id is out of range or a packed buffer is too short (nothing is copied in
    this case), or if neither src nor dst has ids.
    """
    given = src_ids if src_ids is not None else dst_ids
    if given is None:
        raise ValueError("one side needs ids")
    for ids, arena in ((src_ids, src), (dst_ids, dst)):
        if ids is None and arena.shape[0] < len(given):
            raise ValueError("the packed side is too short")
        if ids is not None and not ids.is_cuda and bool(((ids < 0) | (ids >= arena.shape[0])).any()):
            raise ValueError("a block id is out of range")
    if len(given) == 0 or src.shape[1] == 0:
        return
    if uses_engines(src, dst, len(given)):
        copy_each(src, dst, src_ids, dst_ids)
        return
    device = src.device if src.is_cuda else dst.device
    moved = (None if ids is None else ids.to(device, non_blocking=True).contiguous() for ids in (src_ids, dst_ids))
    copy_within(src, dst, *moved, len(given))
