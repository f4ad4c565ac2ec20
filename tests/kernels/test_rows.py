"""Row invariance of every public kernel (docs/design.md, Numbers). A row has the same bits alone, in a batch, in any
chunks, and with 1 and 2 threads. Each kernel's own tests test further requirements on its bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.experts import route
from kernels.gelu_mul import gelu_mul
from kernels.kv_cache import row_width
from kernels.linear import PackedLinear
from kernels.lora import LoraPart, LoraRows, LoraWeights, lora
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.quantization import Bits, quantize
from kernels.rms_norm import rms_norm
from kernels.sampling import log_softmax_top, sample
from kernels.silu_mul import silu_mul
from kernels.softcap import softcap_
from kernels.write_blocks import write_blocks

ROWS = 48  # with the widths below, every kernel uses several threads
Compute = Callable[[slice], tuple[Tensor, ...]]
"""A function that computes some rows with a kernel. It returns tensors with one entry per row."""


def _rms_norm(dtype: torch.dtype, scatter: Any) -> Compute:
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((ROWS, 1001), (ROWS, 1001), (1001,)))
    return lambda rows: rms_norm(x[rows], weight, 1e-5, residual[rows])


def _silu_mul(dtype: torch.dtype, scatter: Any) -> Compute:
    x = torch.randn(ROWS, 2 * 1001).to(dtype)
    return lambda rows: (silu_mul(x[rows]),)


def _gelu_mul(dtype: torch.dtype, scatter: Any) -> Compute:
    x = torch.randn(ROWS, 2 * 1001).to(dtype)
    return lambda rows: (gelu_mul(x[rows]),)


def _softcap(dtype: torch.dtype, scatter: Any) -> Compute:
    x = 30 * torch.randn(ROWS, 1001)
    return lambda rows: (softcap_(x[rows].clone(), 20.0),)


def _route(dtype: torch.dtype, scatter: Any) -> Compute:
    scores = torch.randn(ROWS, 61).to(dtype)
    return lambda rows: route(scores[rows], 7, renormalize=True, round_weights=False)


def _linear(dtype: torch.dtype, scatter: Any) -> Compute:
    x, linear = torch.randn(ROWS, 320).to(dtype), PackedLinear((torch.randn(200, 320) / 18).to(dtype))
    return lambda rows: (linear(x[rows]),)


def _linear_int(dtype: torch.dtype, scatter: Any, bits: Bits = 4) -> Compute:
    x, weight = torch.randn(ROWS, 320).to(dtype), [quantize(torch.randn(200, 320) / 18, bits)]
    linear = PackedLinear(weight, dtype=dtype)
    return lambda rows: (linear(x[rows]),)


def _linear_int8(dtype: torch.dtype, scatter: Any) -> Compute:
    return _linear_int(dtype, scatter, 8)


def _lora(dtype: torch.dtype, scatter: Any) -> Compute:
    """Every fourth row has no adapter; the others have one of three adapters."""
    adapters = [
        LoraWeights([[LoraPart(torch.randn(r, 321).to(dtype), torch.randn(r, 200).to(dtype), 0, 0.5)]])
        for r in (4, 16, 5)
    ]
    x, base = torch.randn(ROWS, 321).to(dtype), torch.randn(ROWS, 200).to(dtype)
    adapter_of_row = np.arange(ROWS, dtype=np.int32) * 7 % 4 - 1

    def compute(rows: slice) -> tuple[Tensor, ...]:
        out = base[rows].clone()
        lora(x[rows], out, LoraRows(adapters, adapter_of_row[rows]), 0)
        return (out,)

    return compute


def _write_blocks(dtype: torch.dtype, scatter: Any, kv_dtype: torch.dtype | None = None) -> Compute:
    heads, kv_heads, d, block_size = 8, 4, 80, 4
    stored = kv_dtype or dtype
    q, k, v = (torch.randn(ROWS, h, d).to(dtype) for h in (heads, kv_heads, kv_heads))
    positions, slots = torch.randint(0, 100, (ROWS,)), torch.randperm(ROWS)
    cos_sin = torch.rand(100, 64)

    def compute(rows: slice) -> tuple[Tensor, ...]:
        turned, width = q[rows].clone(), row_width(d, stored)
        caches = torch.zeros(2, ROWS // block_size, kv_heads, block_size, width, dtype=stored)
        write_blocks(turned, k[rows], v[rows], positions[rows], slots[rows], caches[0], caches[1], cos_sin)
        by_slot = caches.transpose(2, 3).flatten(1, 2)
        return turned, by_slot[0, slots[rows]], by_slot[1, slots[rows]]

    return compute


def _copy_blocks(dtype: torch.dtype, scatter: Any) -> Compute:
    src, ids = torch.randint(0, 256, (ROWS, 8192), dtype=torch.uint8), torch.randperm(ROWS)

    def compute(rows: slice) -> tuple[Tensor, ...]:
        dst = torch.zeros_like(src)
        copy_blocks(src, dst, ids[rows], ids[rows])
        return (dst[ids[rows]],)

    return compute


def _sampling(dtype: torch.dtype, scatter: Any) -> Compute:
    logits, ids = 3 * torch.randn(ROWS, 2000), torch.randint(0, 2000, (ROWS,))
    heat, top_p = torch.rand(ROWS) * (torch.arange(ROWS) % 4 > 0), torch.rand(ROWS) * 0.9 + 0.1  # some rows greedy
    top_k, seeds = torch.randint(0, 60, (ROWS,)), torch.randint(0, 2**62, (ROWS,))
    columns = (heat, top_k, top_p, torch.rand(ROWS) * 0.1, seeds, torch.arange(ROWS) % 3, torch.arange(ROWS))

    def compute(rows: slice) -> tuple[Tensor, ...]:
        top = log_softmax_top(logits[rows], ids[rows], 5)
        return sample(logits[rows], *(c[rows] for c in columns)), top.chosen, top.rank, top.top_ids, top.top

    return compute


def _paged_attention(dtype: torch.dtype, scatter: Any, kv_dtype: torch.dtype | None = None) -> Compute:
    """Each row is a sequence. Some are shorter and some longer than a piece of the key axis."""
    case = scatter([(37 * i) % 290 for i in range(ROWS)], 2, 64, 16, kv_dtype or dtype)
    q = torch.randn(ROWS, 6, 64).to(dtype)

    def compute(rows: slice) -> tuple[Tensor, ...]:
        where = (case.key_cache, case.value_cache, case.block_table[rows], case.context_lens[rows])
        return (paged_attention(q[rows], *where, softmax_scale=0.125),)

    return compute


def _paged_prefill(dtype: torch.dtype, scatter: Any, kv_dtype: torch.dtype | None = None) -> Compute:
    """The rows are the last positions of one sequence, before and after the end of a piece."""
    cached = 230
    case = scatter([cached + ROWS], 2, 64, 16, kv_dtype or dtype)
    q = torch.randn(ROWS, 8, 64).to(dtype)

    def compute(rows: slice) -> tuple[Tensor, ...]:
        end, starts = torch.tensor([cached + rows.stop]), torch.tensor([0, rows.stop - rows.start])
        where = (case.key_cache, case.value_cache, case.block_table, end.int(), starts.int())
        return (paged_prefill(q[rows], *where, softmax_scale=0.125),)

    return compute


def _int8_cache(dtype: torch.dtype, scatter: Any) -> Compute:
    return _in_turn(_of_a_cache(dtype, scatter, torch.int8))


def _fp8_cache(dtype: torch.dtype, scatter: Any) -> Compute:
    return _in_turn(_of_a_cache(dtype, scatter, torch.float8_e4m3fn))


def _of_a_cache(dtype: torch.dtype, scatter: Any, kv_dtype: torch.dtype) -> list[Compute]:
    return [kernel(dtype, scatter, kv_dtype) for kernel in (_write_blocks, _paged_attention, _paged_prefill)]


def _in_turn(each: list[Compute]) -> Compute:
    return lambda rows: tuple(part for compute in each for part in compute(rows))


KERNELS: list[Callable[[torch.dtype, Any], Compute]] = [
    _rms_norm, _silu_mul, _gelu_mul, _softcap, _route, _linear, _linear_int, _linear_int8, _write_blocks, _copy_blocks,
    _sampling, _paged_attention, _paged_prefill, _int8_cache, _fp8_cache, _lora,
]  # fmt: skip


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))  # -0 != 0, NaN == NaN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__[1:])
@given(data=st.data())
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_rows_bits_are_its_own(native_isa: str, scatter: Any, kernel: Any, dtype: Any, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 9), label="seed"))
    torch.set_num_threads(2)
    compute = kernel(dtype, scatter)
    whole = compute(slice(0, ROWS))
    cuts = data.draw(st.sets(st.integers(1, ROWS - 1), max_size=6), label="cuts")
    alone = data.draw(st.integers(0, ROWS - 1), label="alone")
    edges = sorted({0, *cuts, alone, alone + 1, ROWS})
    for start, stop in itertools.pairwise(edges):
        torch.set_num_threads(data.draw(st.integers(1, 2), label="threads"))
        for part, want in zip(compute(slice(start, stop)), whole, strict=True):
            assert same_bits(part, want[start:stop])
    torch.set_num_threads(1)
    assert all(map(same_bits, compute(slice(0, ROWS)), whole))
