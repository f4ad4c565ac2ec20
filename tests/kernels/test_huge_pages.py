"""Packed weights are in memory with huge pages, and keep their values."""

from __future__ import annotations

import itertools
import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu import fallbacks, huge_pages
from kernels.cpu.huge_pages import LEAST_BYTES, REGION_BYTES, HugePages
from kernels.linear import PackedLinear

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages"
)


def may_be_huge(address: int) -> bool:
    """Returns whether the kernel has been asked to use huge pages for the mapping that contains an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            begin, _, end = name.partition("-")
            inside = int(begin, 16) <= address < int(end, 16)
        elif inside and name == "VmFlags:":
            return "hg" in rest
    raise AssertionError(f"no mapping contains {address:#x}")


def test_tensors_keep_their_values_and_do_not_overlap() -> None:
    pages = HugePages()
    sizes = (LEAST_BYTES, LEAST_BYTES + 2, REGION_BYTES // 2, REGION_BYTES // 2, REGION_BYTES + 6, LEAST_BYTES)
    tensors = [torch.randint(-9, 9, (size // 2,), dtype=torch.int16) for size in sizes]
    copies = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        pages.move(tensor)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + size) for tensor, size in zip(tensors, sizes, strict=True))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert all(begin % 64 == 0 and may_be_huge(begin) for begin, _ in ranges)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_may_have_huge_pages(dtype: torch.dtype) -> None:
    weight, x = torch.randn(512, 512).to(dtype), torch.randn(3, 512).to(dtype)
    layer = PackedLinear(weight, provider="simd")
    assert layer.packed is not None and may_be_huge(layer.packed.data_ptr())
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=2e-2, atol=0.2)


def test_a_region_is_freed_with_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[weakref.ref[mmap.mmap]] = []
    make = mmap.mmap

    def noted(*args: Any, **options: Any) -> mmap.mmap:
        region = make(*args, **options)
        regions.append(weakref.ref(region))
        return region

    monkeypatch.setattr(mmap, "mmap", noted)
    pages, tensor, other = HugePages(), torch.zeros(REGION_BYTES), torch.zeros(REGION_BYTES)
    pages.move(tensor)
    pages.move(other)
    assert [region() is not None for region in regions] == [True, True]
    del tensor
    assert [region() is not None for region in regions] == [False, True]


def test_small_and_scattered_tensors_stay() -> None:
    for tensor in (torch.zeros(8), torch.zeros(1024, 1024).T):
        address = tensor.data_ptr()
        huge_pages.move(tensor)
        assert tensor.data_ptr() == address


def test_a_system_without_huge_pages_is_a_counted_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    before, tensor = fallbacks().get("huge pages", 0), torch.zeros(LEAST_BYTES, dtype=torch.uint8)
    HugePages().move(tensor)
    assert fallbacks()["huge pages"] == before + 1
