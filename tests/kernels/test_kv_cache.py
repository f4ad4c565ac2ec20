"""Caches of 8 bits: the bytes of a row, and attention compared with float64 on the numbers in the caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.types import KV_SCALE_BYTES
from kernels.kv_cache import SCALE_BYTES, dequantize_rows, quantize_rows, row_width
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.write_blocks import write_blocks, write_blocks_reference

INT8, FP8 = torch.int8, torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float32)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LARGEST_ERROR = {INT8: 0.5 / 127, FP8: 1 / 16}
"""The largest error of a number, as a fraction of the largest number of its row (int8) or of the number
itself (fp8).
"""


def test_an_int8_row_is_off_by_half_a_step_and_an_fp8_number_by_a_sixteenth() -> None:
    x = torch.randn(50, 64) * torch.logspace(-1, 2, 50)[:, None]
    off = (dequantize_rows(quantize_rows(x, INT8)) - x).abs() / x.abs().amax(-1, keepdim=True)
    assert 0.9 * LARGEST_ERROR[INT8] < float(off.max()) < 1.01 * LARGEST_ERROR[INT8]
    usual = x.abs() > 2**-6  # below, fp8 has a fixed step
    off = ((dequantize_rows(quantize_rows(x, FP8)) - x) / x).abs()[usual]
    assert 0.9 * LARGEST_ERROR[FP8] < float(off.max()) <= LARGEST_ERROR[FP8]
    assert {INT8: KV_SCALE_BYTES["int8"]} == SCALE_BYTES


@pytest.mark.parametrize("kv_dtype", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize(("d", "rotary"), [(8, 8), (24, 16), (128, 128)])
def test_every_build_writes_the_bytes_of_the_reference(native_isa: str, kv_dtype: Any, d: int, rotary: int) -> None:
    tokens, cos_sin = 20, torch.rand(20, rotary)
    sizes = torch.logspace(-5, 3, tokens)[:, None, None]  # below fp8's least number and above its largest
    for dtype in DTYPES:
        q, k, v = (torch.randn(tokens, heads, d) for heads in (4, 2, 2))
        q, k, v = q.to(dtype), (k * sizes).to(dtype), (v * sizes.flip(0)).to(dtype)
        k[4], v[6] = 0, 1e-38
        where = (torch.arange(tokens), torch.randperm(32)[:tokens])
        got, want = (new_caches(kv_dtype, d) for _ in range(2))
        write_blocks(q.clone(), k, v, *where, *got, cos_sin)
        write_blocks_reference(q, k, v, *where, *want, cos_sin)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", [INT8, FP8], ids=["int8", "fp8"])
def test_a_row_without_finite_numbers_is_read_as_nan(isa: str, kv_dtype: torch.dtype) -> None:
    """An infinity saturates in fp8, as on a GPU."""
    q, k, v = torch.randn(3, 1, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    k[0, 0, 5], v[1, 0, 15], k[2, 0, 0] = torch.nan, torch.nan, torch.inf
    caches = new_caches(kv_dtype, 16)[:, :, :1]
    write_blocks(q, k, v, torch.arange(3), torch.arange(3), *caches, None)
    spoiled = dequantize_rows(caches[:, 0, 0, :3]).isnan().any(-1)
    assert spoiled.tolist() == [[True, False, kv_dtype == INT8], [False, True, False]]
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    assert paged_attention(q[:1], *caches, table, lens, softmax_scale=0.25).isnan().all()


def new_caches(kv_dtype: torch.dtype, d: int) -> torch.Tensor:
    """Returns keys and values of two blocks with two heads, each byte 7."""
    return torch.full((2, 2, 2, 16, row_width(d, kv_dtype)), 7, dtype=torch.uint8).view(kv_dtype)


@pytest.mark.parametrize("kv_dtype", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "window"), [(8, 2, 64, None), (3, 1, 8, None), (7, 1, 80, 100)])
def test_attention_over_8_bits_matches_float64(isa: str, scatter: Any, attend_f64: Any, dtype: Any, kv_dtype: Any, heads: int, kv_heads: int, d: int, window: int | None) -> None:  # fmt: skip  # noqa: E501
    """Tests decode, and prefill in chunks of up to 40 queries. Everything that no row sees is poison."""
    lens, chunk = [1, 17, 0, 257, 700], 40
    case = scatter(lens, kv_heads, d, 16, kv_dtype, window=window + chunk if window else 0)
    where = (case.key_cache, case.value_cache, case.block_table, case.context_lens)
    counts = [min(n, chunk) for n in lens]
    starts = [sum(counts[:i]) for i in range(len(lens) + 1)]
    q = torch.randn(starts[-1], heads, d).to(dtype)
    cu = torch.tensor(starts, dtype=torch.int32)
    got = paged_prefill(q, *where, cu, softmax_scale=d**-0.5, window=window)
    last = q[(cu[1:] - 1).clamp(0).long()]
    one = paged_attention(last, *where, softmax_scale=d**-0.5, window=window)
    for i, n in enumerate(lens):
        if n == 0:
            assert not one[i].any()
            continue
        rows = slice(starts[i], starts[i + 1])
        want = attend_f64(q[rows], case.keys[i], case.values[i], d**-0.5, window)
        assert (got[rows] - want).abs().max() <= TOLERANCE[dtype] * max(1.0, float(want.abs().max()))
        assert isa == "reference" or torch.equal(one[i], got[rows][-1])
