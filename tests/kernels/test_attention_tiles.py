"""Attention on AMX tiles, compared with the same build's attention in vectors. Tests of attention elsewhere use the
tiles too, where a CPU has them. On other CPUs with AVX-512, the tiles are emulated (emulated_tiles.h).
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu import amx
from kernels.cpu.loader import current, load, supported_isas
from kernels.kv_cache import by_word
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill

SOURCES = Path(__file__).parents[2] / "kernels" / "cpu"
FLAGS = (
    "-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-w", "-DLL_AVX512", "-mfma",
    "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni",
)  # fmt: skip


@functools.cache
def emulation() -> ctypes.CDLL:
    """Returns the attention on tiles, compiled with emulated instructions."""
    with tempfile.TemporaryDirectory() as directory:
        to = Path(directory) / "emulated.so"
        header = Path(__file__).parent / "emulated_tiles.h"
        files = ["-include", str(header), str(SOURCES / "attention_amx.cpp"), "-o", str(to)]
        subprocess.run(["g++", *FLAGS, *files], check=True)
        return ctypes.CDLL(str(to))


def switch_on() -> None:
    build = current()
    if build.tiles:
        amx.attend_on_tiles(build)
        return
    assert build.handle is not None
    library = emulation()
    assert library.ll_amx_tile_bytes() == build.handle.ll_attention_tile_bytes()
    build.handle.ll_attention_tiles.argtypes = [ctypes.c_void_p]
    build.handle.ll_attention_tiles(ctypes.cast(library.ll_amx_attend, ctypes.c_void_p))


def switch_off() -> None:
    current().handle.ll_attention_tiles(None)  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def _tiles() -> Iterator[None]:
    if "avx512" not in supported_isas() or not (load("avx512").tiles or shutil.which("g++")):
        pytest.skip("this CPU or this installation has no AVX-512, or there are neither AMX tiles nor a compiler")
    switch_on()
    yield
    switch_on() if current().tiles else switch_off()


def attend(case: Any, q: Tensor, lens: list[int], **how: Any) -> Tensor:
    where = (case.key_cache, case.value_cache, case.block_table, case.context_lens)
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    return paged_prefill(q, *where, cu, softmax_scale=q.shape[2] ** -0.5, **how)


@pytest.mark.parametrize("how", [{}, {"window": 50}, {"softcap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(12, 4, 64), (9, 1, 32), (34, 2, 96), (8, 2, 256)])
def test_tiles_and_vectors_agree_and_differ(scatter: Any, heads: int, kv_heads: int, d: int, how: dict[str, Any]) -> None:  # fmt: skip  # noqa: E501
    """Both round differently, so equal bits would mean that the tiles are not used. The first two products of a score
    are large and cancel out. Tiles add other products to each of them first, and so lose bits that vectors keep.
    """
    contexts, chunks = [300, 17, 600], [300, 5, 1]
    case = scatter(contexts, kv_heads, d, 16, torch.bfloat16)
    q = torch.randn(sum(chunks), heads, d).to(torch.bfloat16)
    q[..., :2] = 64.0
    case.key_cache[..., 0], case.key_cache[..., 1] = 64.0, -64.0
    if how.get("sinks"):
        how = {"sinks": torch.randn(heads)}
    on_tiles = attend(case, q, chunks, **how)
    switch_off()
    in_vectors = attend(case, q, chunks, **how)
    assert not torch.equal(on_tiles, in_vectors)
    difference = (on_tiles.float() - in_vectors.float()).abs()
    assert difference.max() < 0.02 * in_vectors.float().abs().max() and difference.mean() < 1e-3


def test_other_shapes_stay_in_vectors(scatter: Any) -> None:
    for d, dtype in ((80, torch.bfloat16), (64, torch.float32)):
        case = scatter([100], 2, d, 16, dtype)
        q = torch.randn(100, 4, d).to(dtype)
        before = attend(case, q, [100])
        switch_off()
        assert torch.equal(attend(case, q, [100]), before)
        switch_on()


def in_blocks(positions: Tensor, block_size: int) -> Tensor:
    """Returns a cache [blocks, 1, block_size, d] with `positions` [n, d]. The last block is filled up with NaN."""
    n, d = positions.shape
    padded = torch.full((-(-n // block_size) * block_size, d), float("nan"), dtype=positions.dtype)
    padded[:n] = positions
    return padded.view(-1, 1, block_size, d)


@pytest.mark.parametrize("group", [1, 3, 4, 5, 16, 17, 40])
def test_a_row_has_the_same_bits_with_any_number_of_heads_and_in_any_blocks(group: int) -> None:
    """Few rows take keys as they lie in memory, in rows or by word, or copy them. Many rows pack them."""
    d, n = 64, 333
    q, k, v = (torch.randn(shape).to(torch.bfloat16) for shape in ((n, group, d), (n, d), (n, d)))
    lens, starts = torch.tensor([n], dtype=torch.int32), torch.tensor([0, n], dtype=torch.int32)
    found: list[Tensor] = []
    for block_size in (1, 8, 16, 64):
        caches = in_blocks(k, block_size), in_blocks(v, block_size)
        order = torch.randperm(len(caches[0]), generator=torch.Generator().manual_seed(block_size))
        keys, values = (torch.empty_like(cache) for cache in caches)
        keys[order], values[order] = caches
        where = (keys, values, order.to(torch.int32)[None], lens)
        found.append(paged_prefill(q, *where, starts, softmax_scale=d**-0.5))
        if block_size >= 16:
            words = by_word(torch.empty_like(keys))
            words.transpose(2, 3).copy_(keys.unflatten(3, (-1, 2)))
            where = (words, *where[1:])
            found.append(paged_prefill(q, *where, starts, softmax_scale=d**-0.5))
        for head in {0, group - 1}:
            alone = paged_attention(q[-1:, head : head + 1].contiguous(), *where, softmax_scale=d**-0.5)
            assert torch.equal(alone[0, 0], found[0][-1, head]), (block_size, head)
    assert found[0].isfinite().all() and all(torch.equal(each, found[0]) for each in found)


def test_the_sign_of_a_zero_does_not_depend_on_the_keys_that_a_row_does_not_see() -> None:
    """Products that are too small become zeros with the sign of the product."""
    d, n = 64, 100
    q, k = torch.randn(n, 1, d).to(torch.bfloat16), torch.randn(n, d).to(torch.bfloat16)
    v = (torch.randn(n, d) * 2e-38).to(torch.bfloat16)
    caches, table = (in_blocks(k, 16), in_blocks(v, 16)), torch.arange(7, dtype=torch.int32)[None]
    starts = torch.tensor([0, n], dtype=torch.int32)
    whole = paged_prefill(q, *caches, table, starts[1:], starts, softmax_scale=d**-0.5)
    for p in range(n):
        lens = torch.tensor([p + 1], dtype=torch.int32)
        alone = paged_attention(q[p : p + 1], *caches, table, lens, softmax_scale=d**-0.5)
        assert torch.equal(alone[0].view(torch.int16), whole[p].view(torch.int16)), p
