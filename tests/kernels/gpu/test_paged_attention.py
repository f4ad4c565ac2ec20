"""Decode attention in Triton compared with float64: odd lengths, layouts, windows, fp8, split keys, poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.gpu import attention
from kernels.gpu.attention import paged_attention, paged_prefill
from kernels.gpu.attention_tiles import Chip, Tiling, num_pieces, num_splits
from testing.gpu_kernels import tolerance_of

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LENS = [1, 15, 16, 17, 33, 0, 250]
MODES = [False, True]


def where(case: Any, device: str) -> tuple[torch.Tensor, ...]:
    """Returns a case on the device: its caches (views of an arena), tables and lengths."""
    arena = case.key_cache._base.to(device)
    views = [arena.as_strided(c.shape, c.stride(), c.storage_offset()) for c in (case.key_cache, case.value_cache)]
    return *views, case.block_table.to(device), case.context_lens.to(device)


def run(case: Any, q: torch.Tensor, device: str, **options: Any) -> torch.Tensor:
    out = torch.full_like(q, float("nan")).to(device)
    got = paged_attention(q.to(device), *where(case, device), softmax_scale=q.shape[-1] ** -0.5, out=out, **options)
    assert got is out
    return got.cpu()


def assert_rows(got: torch.Tensor, q: torch.Tensor, case: Any, attend_f64: Any, window: int | None = None) -> None:
    """Compares every row with float64. Rows without keys must be zero."""
    assert got.isfinite().all()
    for i, n in enumerate(case.context_lens.tolist()):
        want = torch.zeros(1, *q.shape[1:], dtype=torch.float64)
        if n:
            want = attend_f64(q[i : i + 1], case.keys[i], case.values[i], q.shape[-1] ** -0.5, window)
        assert (got[i] - want[0]).abs().max() <= tolerance_of(q.dtype) * float(want.abs().max())


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "d"),
    [(BF16, 2, 2, 64), (FP16, 8, 2, 80), (BF16, 7, 1, 96), (FP16, 8, 1, 128), (BF16, 4, 1, 256), (FP16, 20, 1, 24)],
)
def test_matches_float64(device: str, scatter: Callable[..., Any], attend_f64: Any, dtype: Any, heads: int, kv_heads: int, d: int, deterministic: bool) -> None:  # fmt: skip  # noqa: E501
    case = scatter(LENS, kv_heads, d, 16, dtype)
    q = torch.randn(len(LENS), heads, d).to(dtype)
    assert_rows(run(case, q, device, deterministic=deterministic), q, case, attend_f64)


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize(("block_size", "heads_first"), [(16, False), (32, True), (128, False), (12, True)])
def test_blocks_and_layouts(device: str, scatter: Any, attend_f64: Any, block_size: int, heads_first: bool, deterministic: bool) -> None:  # fmt: skip  # noqa: E501
    case = scatter([1, 33, 130], 2, 64, block_size, BF16, heads_first=heads_first)
    q = torch.randn(3, 4, 64).to(BF16)
    assert_rows(run(case, q, device, deterministic=deterministic), q, case, attend_f64)


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize("window", [1, 100, 600])
def test_window_never_reads_what_slid_out(device: str, scatter: Any, attend_f64: Any, window: int, deterministic: bool) -> None:  # fmt: skip  # noqa: E501
    case = scatter([1, 17, 257, 0, 700], 1, 64, 16, FP16, window=window)
    q = torch.randn(5, 4, 64).to(FP16)
    got = run(case, q, device, window=window, deterministic=deterministic)
    assert_rows(got, q, case, attend_f64, window)


@pytest.mark.parametrize("deterministic", MODES)
def test_fp8_cache_with_scales(device: str, scatter: Any, attend_f64: Any, deterministic: bool) -> None:
    case = scatter([1, 40, 200], 2, 128, 16, FP8)
    q = torch.randn(3, 8, 128).to(BF16)
    got = run(case, q, device, k_scale=0.5, v_scale=3.0, deterministic=deterministic)
    scaled = replace(case, keys=[0.5 * k.double() for k in case.keys], values=[3.0 * v.double() for v in case.values])
    assert_rows(got, q, scaled, attend_f64)


@pytest.mark.parametrize("splits", [1, 3, 9])
def test_any_number_of_splits(device: str, scatter: Any, attend_f64: Any, splits: int) -> None:
    """With more splits than tiles, some splits have no work."""
    case = scatter([0, 1, 64, 65, 300], 1, 80, 16, BF16)
    q = torch.randn(5, 4, 80).to(BF16)
    out = torch.full_like(q, float("nan")).to(device)
    call = attention.Attention(out, q.to(device), *where(case, device), None, 80**-0.5, None, False, 1.0, 1.0)
    assert_rows(attention.launch(call, Tiling(16, 64, 4), splits).cpu(), q, case, attend_f64)


def attend_f64_with(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Returns attention [heads, d] in float64, for q [heads, d] at the last position, keys and values [n, kv_heads, d],
    and scale 0.5.
    """
    group, out = q.shape[0] // keys.shape[1], []
    for head in range(q.shape[0]):
        scores = keys[:, head // group].double() @ q[head].double() * 0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores if sinks is None else torch.cat((scores, sinks[head : head + 1].double()))
        out.append(torch.softmax(scores, 0)[: len(keys)] @ values[:, head // group].double())
    return torch.stack(out)


@pytest.mark.parametrize("deterministic", MODES)
@pytest.mark.parametrize(("softcap", "with_sinks"), [(5.0, False), (None, True), (20.0, True)])
def test_softcap_and_sinks(
    device: str, scatter: Any, softcap: float | None, with_sinks: bool, deterministic: bool
) -> None:
    lens = [1, 0, 17, 700]
    case = scatter(lens, 2, 64, 16, FP16)
    q = torch.randn(len(lens), 4, 64).to(FP16)
    sinks = torch.tensor([-3.0, 0.0, 5.0, 30.0]) if with_sinks else None
    out = torch.full_like(q, float("nan")).to(device)
    given = None if sinks is None else sinks.to(device)
    how: dict[str, Any] = {"softmax_scale": 0.5, "softcap": softcap, "sinks": given, "deterministic": deterministic}
    got = paged_attention(q.to(device), *where(case, device), out=out, **how).cpu()
    for i, n in enumerate(lens):
        want = torch.zeros(4, 64, dtype=torch.float64)
        if n:
            want = attend_f64_with(q[i], case.keys[i], case.values[i], softcap, sinks)
        assert (got[i] - want).abs().max() <= tolerance_of(q.dtype) * max(1.0, float(want.abs().max()))
    rows = 5  # rows of a chunk; the last one is the decode row
    chunk = torch.cat((torch.randn(rows - 1, 4, 64).to(FP16), q[3:]))
    keys, values, table, context_lens = where(case, device)
    cu = torch.tensor([0, rows], dtype=torch.int32, device=device)
    in_chunk = paged_prefill(chunk.to(device), keys, values, table[3:], context_lens[3:], cu, **how).cpu()[-1]
    assert (in_chunk - got[3]).abs().max() <= (0.0 if deterministic else 2e-3)


def test_extreme_scores(device: str, scatter: Any, attend_f64: Any) -> None:
    case = scatter([300], 1, 64, 16, BF16)
    q = (200 * torch.randn(1, 4, 64)).to(BF16)
    assert_rows(run(case, q, device), q, case, attend_f64)


def test_nan_in_a_visible_key_is_seen(device: str, scatter: Any) -> None:
    case = scatter([40], 1, 64, 16, BF16)
    case.key_cache[int(case.block_table[0, 1]), :, 3] = float("nan")
    assert run(case, torch.randn(1, 2, 64).to(BF16), device).isnan().all()


def test_blocks_beyond_2_to_the_31_elements(device: str) -> None:
    """The test uses one block at either end of an arena of 6 GiB, so most of the memory is only virtual."""
    shape, strides = (24, 1, 16, 64), (1 << 27, 1024, 64, 1)
    arena = torch.empty(24 << 27, dtype=BF16, device=device)
    caches = [arena.as_strided(shape, strides, offset) for offset in (0, 1024)]
    for cache in caches:
        cache[23] = torch.randn(1, 16, 64).to(BF16)
    table, lens = torch.tensor([[23]], dtype=torch.int32), torch.tensor([16], dtype=torch.int32)
    q = torch.randn(1, 2, 64).to(BF16).to(device)
    got = paged_attention(q, *caches, table.to(device), lens.to(device), softmax_scale=0.125)
    near = [cache[23:].clone() for cache in caches]
    want = paged_attention(q, *near, 0 * table.to(device), lens.to(device), softmax_scale=0.125)
    assert torch.equal(got, want) and want.isfinite().all()


def test_takes_strided_q_and_out(device: str, scatter: Any) -> None:
    case = scatter([20, 300], 2, 64, 16, BF16)
    fused = torch.randn(2, 4 * 64 + 40).to(BF16).to(device)
    q = fused[:, :256].unflatten(1, (4, 64))
    out = torch.empty(2, 8, 64, dtype=BF16, device=device)[:, ::2]
    assert paged_attention(q, *where(case, device), softmax_scale=0.25, out=out) is out
    assert torch.equal(out, paged_attention(q.contiguous(), *where(case, device), softmax_scale=0.25))


def test_an_empty_batch_is_no_launch(device: str, scatter: Any) -> None:
    keys, values, table, lens = where(scatter([20], 1, 64, 16, BF16), device)
    got = paged_attention(keys.new_empty(0, 4, 64), keys, values, table[:0], lens[:0], softmax_scale=1.0)
    assert got.shape == (0, 4, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(1, 3, 64).to(BF16)}, "multiple of kv heads"),
        ({"q": torch.randn(1, 4, 64)}, "dtype"),
        ({"q": torch.randn(1, 4, 80).to(BF16)}, "head_dim"),
        ({"q": torch.randn(2, 4, 64).to(BF16)}, "one query per sequence"),
        ({"window": 0}, "window"),
        ({"softmax_scale": 0.0}, "scales"),
        ({"context_lens": torch.tensor([20])}, "int32"),
        ({"key_cache": torch.empty(4, 2, 16, 64).to(BF16)}, "strides"),
    ],
)
def test_refuses_what_does_not_fit(device: str, scatter: Any, change: dict[str, Any], message: str) -> None:
    names = ("key_cache", "value_cache", "block_table", "context_lens")
    arguments: dict[str, Any] = dict(zip(names, where(scatter([20], 2, 64, 16, BF16), device), strict=True))
    arguments |= {"q": torch.randn(1, 4, 64).to(BF16), "softmax_scale": 1.0, **change}
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    with pytest.raises(ValueError, match=message):
        paged_attention(**moved)


def test_splits_follow_from_shapes() -> None:
    h200, tiling = Chip(90, 132), Tiling(16, 64, 4, programs_per_sm=4)
    assert num_splits(tiling, 64 * 8, 4096, h200) == 1  # 512 programs for 528 places
    assert num_splits(tiling, 8, 32_768, h200) == 64  # the maximum
    assert num_splits(tiling, 16 * 8, 4096, h200) == 4  # 512 programs for 528 places
    assert num_splits(tiling, 8, 256, h200) == 2  # splits of 128 keys
    assert num_splits(tiling, 8, 16, h200) == 1
    assert [num_pieces(n, None) for n in (0, 1, 512, 513, 4096)] == [1, 1, 1, 2, 8]
    assert [num_pieces(4096, w) for w in (1, 512, 513, 9000)] == [2, 2, 3, 8]
