"""Prefill attention in Triton compared with float64, and in deterministic mode, where a row's bits depend only on the
row.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu import attention_tiles
from kernels.gpu.attention import paged_attention, paged_prefill
from testing.gpu_kernels import tolerance_of

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CONTEXTS, CHUNKS = [1, 33, 0, 150, 17, 90, 64], [1, 33, 0, 20, 1, 0, 64]


def starts(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)


def run(case: Any, q: torch.Tensor, chunks: list[int], device: str, **options: Any) -> torch.Tensor:
    """Computes a batch. q and out are two rows longer than the chunks; these rows must not change."""
    arena = case.key_cache._base.to(device)
    views = [arena.as_strided(c.shape, c.stride(), c.storage_offset()) for c in (case.key_cache, case.value_cache)]
    padded = torch.cat((q, torch.full_like(q[:2], float("nan")))).to(device)
    out = torch.full_like(padded, 7.0)
    where = (*views, case.block_table.to(device), case.context_lens.to(device), starts(chunks).to(device))
    got = paged_prefill(padded, *where, softmax_scale=q.shape[-1] ** -0.5, out=out, **options)
    assert got is out and (out[len(q) :] == 7.0).all()
    return got[: len(q)].cpu()


def assert_chunks(got: torch.Tensor, q: torch.Tensor, case: Any, chunks: list[int], attend_f64: Any, window: int | None = None) -> None:  # fmt: skip  # noqa: E501
    assert got.isfinite().all()
    cu = starts(chunks).tolist()
    for i, n in enumerate(chunks):
        if n:
            rows = slice(cu[i], cu[i + 1])
            want = attend_f64(q[rows], case.keys[i], case.values[i], q.shape[-1] ** -0.5, window)
            assert (got[rows] - want).abs().max() <= tolerance_of(q.dtype) * float(want.abs().max())


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "d", "window", "deterministic"),
    [
        (BF16, 2, 2, 64, None, False),
        (BF16, 2, 2, 64, 40, True),
        (FP16, 4, 1, 80, 40, False),
        (BF16, 7, 1, 96, None, False),
        (BF16, 7, 1, 96, None, True),
        (FP16, 8, 1, 128, None, False),
        (FP16, 8, 1, 128, 40, False),
        (BF16, 4, 1, 256, None, False),
        (BF16, 4, 1, 256, 40, True),
    ],
)
def test_matches_float64(device: str, scatter: Any, attend_f64: Any, dtype: Any, heads: int, kv_heads: int, d: int, window: int | None, deterministic: bool) -> None:  # fmt: skip  # noqa: E501
    case = scatter(CONTEXTS, kv_heads, d, 16, dtype, heads_first=window is None)
    q = torch.randn(sum(CHUNKS), heads, d).to(dtype)
    got = run(case, q, CHUNKS, device, window=window, deterministic=deterministic)
    assert_chunks(got, q, case, CHUNKS, attend_f64, window)


def test_short_chunks_take_small_tiles(device: str, scatter: Any, attend_f64: Any) -> None:
    chunks = [1, 4, 0, 3, 1, 2, 4]
    case = scatter(CONTEXTS, 2, 64, 32, BF16)
    q = torch.randn(sum(chunks), 8, 64).to(BF16)
    assert_chunks(run(case, q, chunks, device, max_q_len=4), q, case, chunks, attend_f64)


def test_fp8_cache_with_scales(device: str, scatter: Any, attend_f64: Any) -> None:
    case = scatter([70, 200], 1, 64, 16, FP8)
    q = torch.randn(100, 4, 64).to(BF16)
    got = run(case, q, [70, 30], device, k_scale=2.0, v_scale=0.25)
    for rows, k, v in zip((slice(70), slice(70, 100)), case.keys, case.values, strict=True):
        want = attend_f64(q[rows], 2.0 * k.double(), 0.25 * v.double(), 0.125)
        assert (got[rows] - want).abs().max() <= tolerance_of(BF16) * float(want.abs().max())


def test_a_window_skips_blocks_before_the_chunk(device: str, scatter: Any, attend_f64: Any) -> None:
    """Blocks that no row of the chunk sees may have been freed, so the kernel must not use their ids."""
    case = scatter([400], 1, 64, 16, BF16, window=60)  # the 20 rows of the chunk see the last 60 keys
    q = torch.randn(20, 4, 64).to(BF16)
    for deterministic in (False, True):
        got = run(case, q, [20], device, window=41, deterministic=deterministic)
        assert_chunks(got, q, case, [20], attend_f64, 41)


@pytest.fixture
def piece(device: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of keys in a piece. It is smaller in the interpreter, so that short sequences have several pieces."""
    if device == "cpu":
        monkeypatch.setattr(attention_tiles, "PIECE", 128)
    return attention_tiles.PIECE


def prefix(case: Any, n: int, device: str) -> tuple[torch.Tensor, ...]:
    keys, values, table = (x.to(device) for x in (case.key_cache, case.value_cache, case.block_table))
    return keys, values, table, torch.tensor([n], dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    ("window", "heads", "kv_heads", "d", "block_size", "cache"),
    [
        (None, 4, 1, 64, 16, BF16),
        (60, 7, 1, 80, 32, FP16),
        (188, 2, 2, 128, 16, BF16),  # the windows of one program's rows begin in two different tiles
        (None, 8, 1, 256, 16, BF16),
        (None, 4, 1, 128, 16, FP8),
    ],
)
def test_deterministic_bits_under_any_chunking_are_those_of_decode(device: str, piece: int, scatter: Any, window: int | None, heads: int, kv_heads: int, d: int, block_size: int, cache: Any) -> None:  # fmt: skip  # noqa: E501
    n, scale = 2 * piece + 13, d**-0.5
    case = scatter([n], kv_heads, d, block_size, cache)
    q = torch.randn(n, heads, d).to(BF16 if cache == FP8 else cache).to(device)
    first = n - 30
    options: dict[str, Any] = {"softmax_scale": scale, "window": window, "deterministic": True}
    whole = paged_prefill(q[first:], *prefix(case, n, device), starts([n - first]).to(device), **options)
    for begin, end in ((first, first + 1), (first + 1, first + 20), (first + 20, n)):
        chunk = paged_prefill(q[begin:end], *prefix(case, end, device), starts([end - begin]).to(device), **options)
        assert torch.equal(chunk, whole[begin - first : end - first])
    for position in (2 * piece - 1, 2 * piece, n - 1):
        one = paged_attention(q[position : position + 1], *prefix(case, position + 1, device), **options)
        assert torch.equal(one[0], whole[position - first])


@pytest.mark.parametrize("window", [None, 140])
def test_deterministic_bits_alone_and_in_a_batch(device: str, piece: int, scatter: Any, window: int | None) -> None:
    """The bits do not depend on other sequences, the width of tables, block sizes, layouts, or whether a chunk has one
    token.
    """
    lens, scale = [5, piece + 30, 0, 2 * piece + 7], 0.125
    case = scatter(lens, 2, 64, 16, BF16)
    q = torch.randn(4, 4, 64).to(BF16).to(device)
    options: dict[str, Any] = {"softmax_scale": scale, "window": window, "deterministic": True}
    where = [x.to(device) for x in (case.key_cache, case.value_cache, case.block_table, case.context_lens)]
    batch = paged_attention(q, *where, **options)
    mixed = paged_prefill(q, *where, starts([1] * 4).to(device), **options)
    assert torch.equal(batch, mixed)
    for i, n in enumerate(lens):
        other = scatter([max(n, 1)], 2, 64, 32, BF16, seed=i, heads_first=False)
        for p in range(n):
            block = int(other.block_table[0, p // 32])
            other.key_cache[block, :, p % 32], other.value_cache[block, :, p % 32] = case.keys[i][p], case.values[i][p]
        alone = paged_attention(q[i : i + 1], *prefix(other, n, device), **options)
        assert torch.equal(alone[0], batch[i])


def test_refuses_bad_starts(device: str, scatter: Any) -> None:
    case = scatter([20], 1, 64, 16, BF16)
    q = torch.randn(4, 1, 64).to(BF16).to(device)
    for bad in (torch.tensor([0, 4]), torch.tensor([0, 2, 4], dtype=torch.int32)):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            paged_prefill(q, *prefix(case, 20, device), bad.to(device), softmax_scale=1.0)
