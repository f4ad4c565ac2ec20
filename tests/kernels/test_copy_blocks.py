"""Batched block copies: within an arena, between two arenas, with several threads, and rejected copies that write
nothing.
"""

from __future__ import annotations

import pytest
import torch

from kernels.copy_blocks import copy_blocks


@pytest.mark.parametrize("block_bytes", [1, 64, 1000, 1 << 16])
def test_between_arenas(isa: str, block_bytes: int) -> None:
    src = torch.randint(0, 256, (20, block_bytes), dtype=torch.uint8)
    dst = torch.zeros(30, block_bytes, dtype=torch.uint8)
    src_ids, dst_ids = torch.randperm(20)[:13], torch.randperm(30)[:13]
    copy_blocks(src, dst, src_ids, dst_ids)
    assert torch.equal(dst[dst_ids], src[src_ids])
    others = torch.ones(30, dtype=torch.bool)
    others[dst_ids] = False
    assert not dst[others].any()


def test_within_one_arena_of_strided_blocks(isa: str) -> None:
    arena = torch.randint(0, 256, (8, 160), dtype=torch.uint8)[:, :128]
    before = arena.clone()
    copy_blocks(arena, arena, torch.tensor([0, 0, 5]), torch.tensor([1, 2, 7]))
    assert torch.equal(arena[[1, 2, 7]], before[[0, 0, 5]])
    assert torch.equal(arena[[0, 3, 4, 5, 6]], before[[0, 3, 4, 5, 6]])


def test_nothing_to_copy(isa: str) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    copy_blocks(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.uint8), empty, empty)


def test_refuses_ids_out_of_range(isa: str) -> None:
    src, dst = torch.ones(2, 8, dtype=torch.uint8), torch.zeros(2, 8, dtype=torch.uint8)
    for a, b in ((2, 0), (0, 2), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="out of range"):
            copy_blocks(src, dst, torch.tensor([0, a]), torch.tensor([1, b]))
    assert not dst.any()


def test_refuses_blocks_of_two_sizes(isa: str) -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="one size"):
        copy_blocks(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 9, dtype=torch.uint8), ids, ids)
