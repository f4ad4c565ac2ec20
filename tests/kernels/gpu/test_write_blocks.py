"""RoPE and the write into slots in Triton: comparison with the reference, untouched memory, fp8 caches, values out of
range.
"""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.write_blocks import write_blocks
from kernels.write_blocks import write_blocks_reference
from testing.gpu_kernels import rounded, tolerance_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(4, 2, 64, 64), (12, 12, 64, 0), (3, 1, 8, 8), (5, 5, 80, 32), (2, 1, 256, 256), (9, 8, 96, 96)]


def _table(max_pos: int, rotary: int, device: str) -> torch.Tensor | None:
    if not rotary:
        return None
    angles = torch.outer(torch.arange(max_pos).double(), 10000.0 ** (-torch.arange(0, rotary, 2).double() / rotary))
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)


def _fused(tokens: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """Returns q, k and v as views of one fused output, with poison between the rows."""
    g, width = torch.Generator().manual_seed(0), (heads + 2 * kv_heads) * d
    qkv = torch.full((tokens, width + 16), float("nan"))
    qkv[:, :width] = torch.randn(tokens, width, generator=g)
    parts = qkv.to(dtype).to(device)[:, :width].split((heads * d, kv_heads * d, kv_heads * d), 1)
    return tuple(p.unflatten(1, (-1, d)) for p in parts)


def _caches(blocks: int, kv_heads: int, block_size: int, d: int, dtype: torch.dtype, device: str, heads_first: bool) -> list[torch.Tensor]:  # fmt: skip  # noqa: E501
    """Returns one layer's caches [blocks, kv_heads, block_size, d] in a block-major arena of two layers,
    filled with 7.
    """
    inner = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
    arena = torch.full((blocks, 2, 2, *inner, d), 7.0).to(dtype).to(device)
    return [a if heads_first else a.transpose(1, 2) for a in (arena[:, 1, 0], arena[:, 1, 1])]


def _slots(tokens: int, num_slots: int, device: str) -> torch.Tensor:
    return torch.randperm(num_slots, generator=torch.Generator().manual_seed(1))[:tokens].to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "rotary"), SHAPES)
def test_matches_the_reference(device: str, dtype: torch.dtype, heads_first: bool, heads: int, kv_heads: int, d: int, rotary: int) -> None:  # fmt: skip  # noqa: E501
    """tests/kernels/test_write_blocks.py compares the reference with float64."""
    tokens, blocks, block_size = 7, 3, 16
    q, k, v = _fused(tokens, heads, kv_heads, d, dtype, device)
    wide = [t.float().clone() for t in (q, k, v)]
    before_k, cos_sin = k.clone(), _table(500, rotary, device)
    positions = torch.tensor([0, 1, 499, 17, 18, 3, 250], device=device)
    slots = _slots(tokens, blocks * block_size, device)
    slots[2] = slots[5] = -1
    caches = _caches(blocks, kv_heads, block_size, d, dtype, device, heads_first)
    want = [c.float().clone() for c in caches]
    write_blocks_reference(*wide, positions, slots, *want, cos_sin)
    write_blocks(q, k, v, positions, slots, *caches, cos_sin)
    assert torch.equal(k, before_k)
    for got, exact in zip((q, *caches), (wide[0], *want), strict=True):
        assert torch.allclose(got.float(), exact, rtol=tolerance_of(dtype), atol=tolerance_of(dtype))
        assert (got == rounded(exact, dtype)).float().mean() > (0.9 if dtype == torch.float32 else 0.99)
    untouched = torch.ones(blocks * block_size, dtype=torch.bool, device=device)
    untouched[slots[slots >= 0]] = False
    for cache in caches:
        assert (cache.transpose(1, 2).flatten(0, 1)[untouched] == 7).all()


def test_without_rope_nothing_changes_on_the_way(device: str) -> None:
    q, k, v = _fused(5, 12, 12, 64, torch.bfloat16, device)
    before, caches = q.clone(), _caches(2, 12, 16, 64, torch.bfloat16, device, True)
    slots = _slots(5, 32, device)
    write_blocks(q, k, v, torch.arange(5, device=device), slots, *caches, None)
    assert torch.equal(q, before)
    for cache, x in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[slots // 16, :, slots % 16], x)


def test_a_token_does_not_depend_on_the_batch(device: str) -> None:
    results = []
    for tokens in (slice(0, 33), slice(16, 17)):
        q, k, v = (t[tokens] for t in _fused(33, 4, 2, 64, torch.float32, device))
        positions, slots = torch.arange(33, device=device)[tokens], torch.arange(33, device=device)[tokens]
        caches = _caches(3, 2, 16, 64, torch.float32, device, True)
        write_blocks(q, k, v, positions, slots, *caches, _table(64, 64, device))
        results.append([t[-17:][:1] for t in (q,)] + [c[1, :, 0] for c in caches])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_out_of_range_corrupts_nothing_else(device: str) -> None:
    """Nothing is written for a slot past the cache. A position past the table affects only its own token."""
    q, k, v = _fused(4, 2, 1, 16, torch.float32, device)
    caches = _caches(2, 1, 4, 16, torch.float32, device, True)
    guarded = [c[:1] for c in caches]  # block 1 represents memory outside the cache
    positions = torch.tensor([1, 64, -1, 2], device=device)
    write_blocks(q, k, v, positions, torch.tensor([4, 1, 2, 3], device=device), *guarded, _table(64, 16, device))
    assert all((c[1] == 7).all() and (c[0, :, 0] == 7).all() for c in caches)
    assert q[1:3].isnan().all() and q[[0, 3]].isfinite().all()
    assert caches[0][0, :, 1:3].isnan().all() and torch.equal(caches[1][0, 0, 1:4], v[1:, 0])


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("rotary", [0, 64])
def test_fp8_caches(device: str, heads_first: bool, rotary: int) -> None:
    """The test uses quarter turns and numbers that fp8 represents exactly, because the interpreter's rounding to fp8 is
    not exact.
    """
    tokens, d, scales = 6, 64, (0.5, 2.0)
    g = torch.Generator().manual_seed(2)
    powers = torch.tensor(2.0) ** torch.arange(-2, 4)[:, None, None]
    exact = torch.randint(-15, 16, (3, tokens, 2, d), generator=g) * powers
    q, k, v = exact.bfloat16().to(device)
    before_k, before_v = k.clone(), v.clone()
    k[0, 0, :4], v[0, 0, :4] = torch.tensor([1e4, -1e4, 448 * 0.5, 0.0]), torch.tensor([-3e38, 3e38, 0.0, 448 * 2.0])
    before_k[0, 0, :4], before_v[0, 0, :4] = k[0, 0, :4], v[0, 0, :4]
    caches = _caches(1, 2, 16, d, torch.float8_e4m3fn, device, heads_first)
    turn = torch.zeros(4, rotary)
    turn[[0, 2], : rotary // 2] = turn[[1, 3], rotary // 2 :] = torch.tensor([[1.0], [-1.0]])
    positions, slots = torch.arange(tokens, device=device) % 4, _slots(tokens, 16, device)
    write_blocks(
        q, k, v, positions, slots, *caches, turn.to(device) if rotary else None, k_scale=scales[0], v_scale=scales[1]
    )
    if rotary:
        throwaway = torch.zeros(1, 2, 16, d, device=device)
        turned = throwaway.clone()
        write_blocks_reference(q.float(), before_k.float(), before_v.float(), positions, slots, turned, throwaway, turn.to(device))  # fmt: skip  # noqa: E501
        before_k = turned[0][:, slots].transpose(0, 1)
    for cache, x, scale in zip(caches, (before_k, before_v), scales, strict=True):
        want = (x.float() / scale).clamp(-448, 448)
        assert torch.equal(cache[0][:, slots].transpose(0, 1).float(), want.to(torch.float8_e4m3fn).float())
        assert want.abs().max() == 448


def test_refuses_strided_heads(device: str) -> None:
    q, k, v = _fused(2, 1, 1, 16, torch.float32, device)
    caches, ids = _caches(1, 1, 4, 16, torch.float32, device, True), torch.arange(2, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        write_blocks(q[..., ::2], k[..., ::2], v[..., ::2], ids, ids, *(c[..., ::2] for c in caches), None)
