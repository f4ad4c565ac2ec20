"""Block copies in Triton: within and between arenas, gather, scatter, odd sizes, ids out of range, host and device."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.copy_blocks import copy_blocks, copy_each, copy_within, uses_engines

SIZES = [1, 48, 64, 1000, 40_000, 1 << 16]


def _arena(num_blocks: int, block_bytes: int, device: str, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_blocks, block_bytes), dtype=torch.uint8, generator=g).to(device)


def _ids(num_blocks: int, n: int, seed: int) -> torch.Tensor:
    return torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))[:n]


@pytest.mark.parametrize("block_bytes", SIZES)
@pytest.mark.parametrize("ids_on_host", [False, True])
def test_between_arenas(device: str, block_bytes: int, ids_on_host: bool) -> None:
    src, dst = _arena(20, block_bytes, device), _arena(30, block_bytes, device, 1)
    src_ids, dst_ids = (ids if ids_on_host else ids.to(device) for ids in (_ids(20, 13, 2), _ids(30, 13, 3)))
    want = dst.clone()
    want[dst_ids.to(device)] = src[src_ids.to(device)]
    copy_blocks(src, dst, src_ids, dst_ids)
    assert torch.equal(dst, want)


@pytest.mark.parametrize("block_bytes", SIZES)
def test_gather_and_scatter(device: str, block_bytes: int) -> None:
    arena, ids = _arena(12, block_bytes, device), _ids(12, 7, 1).to(device)
    packed = torch.zeros(8, block_bytes, dtype=torch.uint8, device=device)
    copy_blocks(arena, packed, ids, None)
    assert torch.equal(packed[:7], arena[ids]) and not packed[7].any()
    back = torch.zeros_like(arena)
    copy_blocks(packed, back, None, ids)
    want = torch.zeros_like(arena)
    want[ids] = arena[ids]
    assert torch.equal(back, want)


@pytest.mark.parametrize(("row", "first"), [(160, 0), (136, 0), (160, 8), (160, 3)])
def test_within_one_arena_of_strided_blocks(device: str, row: int, first: int) -> None:
    """Copies use 16-byte words only if every block starts at a multiple of 16 bytes."""
    whole = _arena(8, row, device)
    arena, before = whole[:, first : first + 128], whole.clone()
    copy_blocks(arena, arena, torch.tensor([0, 0, 5]), torch.tensor([1, 2, 7]))
    before[[1, 2, 7], first : first + 128] = before[[0, 0, 5], first : first + 128]
    assert torch.equal(whole, before)


def test_pairs_out_of_range_are_left_out_on_the_device(device: str) -> None:
    src, dst = _arena(4, 64, device), torch.zeros(4, 64, dtype=torch.uint8, device=device)
    src_ids, dst_ids = torch.tensor([-1, 4, 2, 3, 1]), torch.tensor([0, 1, -1, 4, 3])
    copy_within(src, dst, src_ids.to(device), dst_ids.to(device), 5)
    assert not dst[:3].any() and torch.equal(dst[3], src[1])


def test_ids_out_of_range_on_the_host_are_refused(device: str) -> None:
    src, dst = _arena(2, 64, device), torch.zeros(2, 64, dtype=torch.uint8, device=device)
    for a, b in ((2, 0), (0, 2), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="out of range"):
            copy_blocks(src, dst, torch.tensor([0, a]), torch.tensor([1, b]))
    with pytest.raises(ValueError, match="too short"):
        copy_blocks(src, dst, torch.tensor([0, 1, 0]), None)
    with pytest.raises(ValueError, match="needs ids"):
        copy_blocks(src, dst, None, None)
    assert not dst.any()


def test_nothing_to_copy(device: str) -> None:
    arena, none = _arena(2, 64, device), torch.empty(0, dtype=torch.int64)
    before = arena.clone()
    copy_blocks(arena, arena, none, none)
    copy_blocks(arena, arena, none, None)
    assert torch.equal(arena, before)


@pytest.mark.parametrize(("block_bytes", "n"), [(64, 3), (64, 20), (32_768, 20)])
def test_swaps_out_and_in(device: str, block_bytes: int, n: int) -> None:
    """Copies to pinned host memory and back, with the method for this size. Without a GPU, both sides are in host
    memory.
    """
    arena = _arena(24, block_bytes, device)
    host = torch.zeros(32, block_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    ids, slots = _ids(24, n, 1), _ids(32, n, 2)
    copy_blocks(arena, host, ids, slots)
    back = torch.zeros_like(arena)
    copy_blocks(host, back, slots, ids)
    if device == "cuda":
        torch.cuda.synchronize()
    kept = arena[ids.to(device)].cpu()
    assert torch.equal(host[slots], kept) and torch.equal(back[ids.to(device)].cpu(), kept)
    assert uses_engines(arena, host, n) == (device == "cuda" and not (block_bytes == 64 and n == 20))


@pytest.mark.parametrize("identity", ["", "src", "dst"])
def test_one_copy_per_block(device: str, identity: str) -> None:
    src, dst = _arena(6, 100, device), torch.zeros(6, 100, dtype=torch.uint8)
    src_ids = None if identity == "src" else torch.tensor([5, 1, 2])
    dst_ids = None if identity == "dst" else torch.tensor([0, 4, 3])
    copy_each(src, dst, src_ids, dst_ids)
    if device == "cuda":
        torch.cuda.synchronize()
    want = torch.zeros(6, 100, dtype=torch.uint8)
    want[[0, 1, 2] if dst_ids is None else dst_ids] = src.cpu()[[0, 1, 2] if src_ids is None else src_ids]
    assert torch.equal(dst, want)
