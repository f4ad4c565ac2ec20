"""Decode attention compared with float64 for odd shapes and poisoned memory, and its bits for any batch and
block size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.paged_attention import paged_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = (torch.float32, torch.bfloat16)
LENS = [1, 15, 16, 17, 0, 31, 255, 256, 257, 700]


def run(case: Any, q: torch.Tensor, window: int | None = None) -> torch.Tensor:
    where = (case.key_cache, case.value_cache, case.block_table, case.context_lens)
    return paged_attention(q, *where, softmax_scale=q.shape[-1] ** -0.5, window=window)


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.isfinite().all()
    assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * max(1.0, float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 4, 16), (8, 2, 64), (7, 1, 80), (16, 2, 128), (3, 1, 8)])
def test_matches_float64(isa: str, scatter: Callable[..., Any], attend_f64: Any, dtype: Any, heads: int, kv_heads: int, d: int) -> None:  # fmt: skip  # noqa: E501
    case = scatter(LENS, kv_heads, d, 16, dtype)
    q = torch.randn(len(LENS), heads, d).to(dtype)
    got = run(case, q)
    for i, n in enumerate(LENS):
        if n == 0:
            assert torch.equal(got[i], torch.zeros_like(got[i]))
        else:
            assert_close(got[i : i + 1], attend_f64(q[i : i + 1], case.keys[i], case.values[i], d**-0.5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "block_size", "heads_first"), [(32, 4, True), (96, 8, False), (256, 32, True), (24, 48, False)])  # fmt: skip  # noqa: E501
def test_layouts_and_odd_head_dims(native_isa: str, scatter: Any, attend_f64: Any, dtype: Any, d: int, block_size: int, heads_first: bool) -> None:  # fmt: skip  # noqa: E501
    lens = [1, 33, 300]
    case = scatter(lens, 2, d, block_size, dtype, heads_first=heads_first)
    q = torch.randn(3, 4, d).to(dtype)
    got = run(case, q)
    for i in range(3):
        assert_close(got[i : i + 1], attend_f64(q[i : i + 1], case.keys[i], case.values[i], d**-0.5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 100, 256, 1000])
def test_window_never_reads_what_slid_out(isa: str, scatter: Any, attend_f64: Any, dtype: Any, window: int) -> None:
    lens = [1, 17, 257, 700]
    case = scatter(lens, 2, 64, 16, dtype, window=window)
    q = torch.randn(len(lens), 6, 64).to(dtype)
    got = run(case, q, window)
    for i in range(len(lens)):
        want = attend_f64(q[i : i + 1], case.keys[i], case.values[i], 0.125, window)
        assert_close(got[i : i + 1], want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scores(native_isa: str, scatter: Any, attend_f64: Any, dtype: Any) -> None:
    case = scatter([600], 1, 64, 16, dtype)
    q = (200 * torch.randn(1, 4, 64)).to(dtype)
    assert_close(run(case, q), attend_f64(q, case.keys[0], case.values[0], 0.125), torch.bfloat16)


def test_nan_in_a_visible_key_is_seen(native_isa: str, scatter: Any) -> None:
    case = scatter([40], 1, 16, 16, torch.float32)
    case.key_cache[int(case.block_table[0, 1]), :, 3] = float("nan")
    assert run(case, torch.randn(1, 2, 16)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_batch_threads_or_blocks(native_isa: str, scatter: Any, dtype: Any) -> None:
    case = scatter(LENS, 2, 64, 16, dtype, seed=1)
    other = scatter(LENS, 2, 64, 32, dtype, seed=1)  # copies the numbers, so that both cases have the same ones
    q = torch.randn(len(LENS), 14, 64).to(dtype)
    batch = run(case, q)
    torch.set_num_threads(1)
    assert torch.equal(run(case, q), batch)
    for i, n in enumerate(LENS):
        for p in range(n):
            block = int(other.block_table[i, p // 32])
            other.key_cache[block, :, p % 32] = case.keys[i][p]
            other.value_cache[block, :, p % 32] = case.values[i][p]
    torch.set_num_threads(2)
    assert torch.equal(run(other, q), batch)
    for threads in (1, 2, 5):  # 5: the key axis is split over threads
        torch.set_num_threads(threads)
        for i in range(len(LENS)):
            one = slice(i, i + 1)
            where = (case.key_cache, case.value_cache, case.block_table[one], case.context_lens[one])
            assert torch.equal(paged_attention(q[one], *where, softmax_scale=0.125)[0], batch[i])


def test_refuses_what_does_not_fit(isa: str, scatter: Any) -> None:
    case = scatter([20], 2, 16, 16, torch.float32)
    q = torch.randn(1, 4, 16)
    with pytest.raises(ValueError, match="multiple of kv heads"):
        run(case, torch.randn(1, 3, 16))
    with pytest.raises(ValueError, match="dtype"):
        run(case, q.bfloat16())
    with pytest.raises(ValueError, match="window"):
        run(case, q, 0)


def test_refuses_block_ids_outside_the_cache(native_isa: str, scatter: Any) -> None:
    case = scatter([20], 2, 16, 16, torch.float32)
    case.block_table[0, 1] = case.key_cache.shape[0]
    with pytest.raises(ValueError, match="block table"):
        run(case, torch.randn(1, 4, 16))
    case.context_lens[0] = 10_000
    with pytest.raises(ValueError, match="block table"):
        run(case, torch.randn(1, 4, 16))


def test_writes_into_out_and_takes_strided_q(native_isa: str, scatter: Any) -> None:
    case = scatter([20, 300], 2, 16, 16, torch.float32)
    fused = torch.randn(2, 4 * 16 + 40)
    q = fused[:, :64].unflatten(1, (4, 16))
    out = torch.empty(2, 8, 16)[:, ::2]
    where = (case.key_cache, case.value_cache, case.block_table, case.context_lens)
    assert paged_attention(q, *where, softmax_scale=0.25, out=out) is out
    assert torch.equal(out, paged_attention(q.contiguous(), *where, softmax_scale=0.25))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_sequences_with_a_common_prefix_have_the_bits_they_have_alone(
    native_isa: str, dtype: Any, threads: int, group: int
) -> None:
    """Their common blocks are read once for all sequences. The prefix ends before, at and after the end of a piece of
    256 keys.
    """
    kv_heads, d, block_size, num_blocks, width = 2, 64, 16, 400, 50
    torch.set_num_threads(threads)
    arena = torch.randn(num_blocks, 2, kv_heads, block_size, d).to(dtype)
    lens = [255, 256, 257, 512, 513, 600, 0, 800, 800, 700, 1] * 2
    table = torch.randint(0, num_blocks, (len(lens), width)).int()
    for row, common in enumerate([0, 16, 16, 31, 32, 32, 32, 32, 50, 17, 1] * 2):
        table[row, :common] = table[row % 3, :common]  # three families with common prefixes of different lengths
    q, sizes = torch.randn(len(lens), kv_heads * group, d).to(dtype), torch.tensor(lens, dtype=torch.int32)

    def attend(rows: slice) -> torch.Tensor:
        return paged_attention(q[rows], arena[:, 0], arena[:, 1], table[rows], sizes[rows], softmax_scale=0.125)

    together = attend(slice(None))
    for row in range(len(lens)):
        assert torch.equal(attend(slice(row, row + 1))[0], together[row]), f"row {row} of {lens[row]} keys"
