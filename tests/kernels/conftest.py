"""Fixtures: every build of the kernels for this CPU, and arenas with poison wherever no kernel may read."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads; spinning threads would starve each other

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import cpu
from kernels.kv_cache import dequantize_rows, quantize_rows, row_width


@pytest.fixture(params=[*cpu.supported_isas(), "reference"])
def isa(request: pytest.FixtureRequest) -> Iterator[cpu.Isa]:
    """Runs the test on each build and on the reference."""
    with cpu.using(request.param):
        yield request.param


@pytest.fixture(params=cpu.supported_isas())
def native_isa(request: pytest.FixtureRequest) -> Iterator[cpu.Isa]:
    """Runs the test on each C++ build."""
    with cpu.using(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Sequences with keys and values [len, kv_heads, d], which are scattered over a poisoned arena. Those of an int8
    cache are dequantized.
    """

    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def _scatter(
    lens: list[int],
    kv_heads: int,
    d: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
    heads_first: bool,
    window: int,
) -> PagedCase:
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lens]
    num_blocks, layers = sum(counts) + 3, 2
    inner = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
    poison = torch.full((num_blocks, layers, 2, *inner, row_width(d, dtype) * dtype.itemsize), 0xFF, dtype=torch.uint8)
    arena = poison.view(dtype)  # NaN, or int8 with scales that are NaN
    key_cache, value_cache = (a if heads_first else a.transpose(1, 2) for a in (arena[:, 1, 0], arena[:, 1, 1]))
    ids = torch.randperm(num_blocks, generator=g)
    table = torch.full((len(lens), max([*counts, 1]) + 1), -7, dtype=torch.int32)  # ids that no kernel may use
    keys, values, used = [], [], 0
    for i, n in enumerate(lens):
        k = quantize_rows(torch.randn(n, kv_heads, d, generator=g), dtype)
        v = quantize_rows(torch.randn(n, kv_heads, d, generator=g), dtype)
        first = max(0, n - window) if window else 0  # earlier blocks may have been freed and reused
        table[i, : counts[i]] = ids[used : used + counts[i]].int()
        for p in range(first, n):
            block = int(table[i, p // block_size])
            key_cache[block, :, p % block_size] = k[p]
            value_cache[block, :, p % block_size] = v[p]
        table[i, : first // block_size] = -7
        used += counts[i]
        keys.append(dequantize_rows(k) if dtype == torch.int8 else k)
        values.append(dequantize_rows(v) if dtype == torch.int8 else v)
    return PagedCase(key_cache, value_cache, table, torch.tensor(lens, dtype=torch.int32), keys, values)


@pytest.fixture
def scatter() -> Callable[..., PagedCase]:
    """Returns scatter(lens, kv_heads, d, block_size, dtype, seed, heads_first=True, window=0), which returns a
    `PagedCase`. Positions before a window are poison, and their block ids are invalid.
    """

    def build(
        lens: list[int],
        kv_heads: int,
        d: int,
        block_size: int,
        dtype: torch.dtype,
        seed: int = 0,
        heads_first: bool = True,
        window: int = 0,
    ) -> PagedCase:
        return _scatter(lens, kv_heads, d, block_size, dtype, seed, heads_first, window)

    return build


@pytest.fixture
def attend_f64() -> Callable[..., Tensor]:
    """Returns attend_f64(q [n, H, d], k, v [len, KVH, d], scale, window), the causal attention of the last n positions
    in float64.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        pos = torch.arange(len(k) - len(q), len(k))[:, None]
        key_pos = torch.arange(len(k))[None, :]
        visible = (key_pos <= pos) & (key_pos > pos - (window or len(k) + 1))
        keys, vals = (t.double().repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->qhk", q.double(), keys) * scale
        weights = torch.softmax(scores.masked_fill(~visible[:, None], float("-inf")), -1)
        return torch.einsum("qhk,khd->qhd", weights, vals)

    return attend
