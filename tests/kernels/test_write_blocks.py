"""RoPE and the write into slots, compared with float64 and Hugging Face's rotation. All other memory stays
unchanged.
"""

from __future__ import annotations

import pytest
import torch

from kernels.write_blocks import write_blocks

DTYPES = (torch.float32, torch.bfloat16)


def table(max_pos: int, rotary: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(max_pos).double(), 10000.0 ** (-torch.arange(0, rotary, 2).double() / rotary))
    return torch.cat((angles.cos(), angles.sin()), -1).float()


def rotated(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Returns x * cos + rotate_half(x) * sin, as in Hugging Face, in float64."""
    rotary = cos_sin.shape[1]
    cos, sin = (c.double()[positions][:, None].repeat(1, 1, 2) for c in cos_sin.chunk(2, -1))
    turn, rest = x.double().split((rotary, x.shape[-1] - rotary), -1)
    a, b = turn.chunk(2, -1)
    return torch.cat((turn * cos + torch.cat((-b, a), -1) * sin, rest), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "d", "rotary"), [(4, 2, 64, 64), (3, 1, 8, 8), (5, 5, 80, 32), (2, 1, 256, 256)])  # fmt: skip  # noqa: E501
def test_rotates_and_writes(isa: str, dtype: torch.dtype, heads_first: bool, heads: int, kv_heads: int, d: int, rotary: int) -> None:  # fmt: skip  # noqa: E501
    tokens, blocks, block_size = 37, 9, 16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * d).to(dtype)
    q, k, v = (p.unflatten(1, (-1, d)) for p in qkv.split((heads * d, kv_heads * d, kv_heads * d), 1))
    before_q, before_k = q.clone(), k.clone()
    positions = torch.randint(0, 500, (tokens,))
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[5] = slots[17] = -1
    inner = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
    arena = torch.full((blocks, 2, *inner, d), 7.0, dtype=dtype)
    caches = [a if heads_first else a.transpose(1, 2) for a in (arena[:, 0], arena[:, 1])]
    cos_sin = table(500, rotary)
    write_blocks(q, k, v, positions, slots, caches[0], caches[1], cos_sin)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert torch.allclose(q.double(), rotated(before_q, positions, cos_sin), rtol=tolerance, atol=tolerance)
    assert torch.equal(k, before_k)
    want_k = rotated(before_k, positions, cos_sin)
    untouched = torch.ones(blocks, block_size, dtype=torch.bool)
    for t, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        untouched[block, offset] = False
        assert torch.allclose(caches[0][block, :, offset].double(), want_k[t], rtol=tolerance, atol=tolerance)
        assert torch.equal(caches[1][block, :, offset], v[t])
    for cache in caches:
        assert (cache.transpose(1, 2)[untouched] == 7).all()


def test_bf16_rounds_once(native_isa: str) -> None:
    q = torch.randn(50, 4, 64).bfloat16()
    k = v = torch.randn(50, 4, 64).bfloat16()
    cache, positions, cos_sin = torch.zeros(4, 4, 16, 64).bfloat16(), torch.arange(50), table(50, 64)
    want = rotated(q, positions, cos_sin).float().bfloat16()
    write_blocks(q, k, v, positions, torch.arange(50), cache, cache.clone(), cos_sin)
    assert (q == want).float().mean() > 0.999  # float64 to fp32 to bf16 rounds twice, which rarely matters


def test_without_rope_copies(isa: str) -> None:
    q, k, v = torch.randn(3, 2, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    before, caches = q.clone(), (torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 4, 16))
    write_blocks(q, k, v, torch.arange(3), torch.tensor([7, 0, 4]), *caches, None)
    assert torch.equal(q, before)
    assert torch.equal(caches[0][1, 0, 3], k[0, 0]) and torch.equal(caches[1][1, 0, 0], v[2, 0])


def test_refuses_slots_and_positions_out_of_range(native_isa: str) -> None:
    q = k = v = torch.randn(1, 1, 16)
    caches = (torch.zeros(2, 1, 4, 16), torch.zeros(2, 1, 4, 16))
    for position, slot in ((0, 8), (10, 0), (-1, 0)):
        with pytest.raises(ValueError, match="out of range"):
            write_blocks(q, k, v, torch.tensor([position]), torch.tensor([slot]), *caches, table(10, 16))
    assert not caches[0].any()
