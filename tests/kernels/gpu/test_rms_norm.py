"""RMS norm in Triton: comparison with float64, Hugging Face's roundings, strided heads, poison beside rows, bits in any
batch.
"""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.rms_norm import rms_norm
from testing.gpu_kernels import rounded, tolerance_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(1, 8), (5, 64), (3, 4, 80), (0, 64), (2, 1000), (7, 33), (64,), (2, 4096)]


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_matches_float64(device: str, dtype: torch.dtype, shape: tuple[int, ...], with_residual: bool) -> None:
    x, residual, weight = (_random(s, dtype, device, i) for i, s in enumerate((shape, shape, shape[-1:])))
    summed = rounded(x.float() + residual.float(), dtype) if with_residual else x
    wide = summed.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    if with_residual:
        got, new_residual = rms_norm(x, weight, 1e-5, residual)
        assert torch.equal(new_residual, summed) and torch.equal(got, rms_norm(summed, weight, 1e-5))
    else:
        got = rms_norm(x, weight, 1e-5)
    assert got.shape == x.shape and got.dtype == dtype
    assert torch.allclose(got.double(), want, rtol=tolerance_of(dtype), atol=tolerance_of(dtype))
    if not with_residual:
        got = rms_norm(x, weight.float(), 1e-5)
        assert got.dtype == dtype
        assert torch.allclose(got.double(), want, rtol=tolerance_of(dtype), atol=tolerance_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_like_hugging_face(device: str, dtype: torch.dtype) -> None:
    x, weight = _random((16, 768), dtype, device, 0), _random((768,), dtype, device, 1)
    normed = rounded(x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5), dtype)
    want = rounded(normed.float() * weight.float(), dtype)
    same = rms_norm(x, weight, 1e-5) == want
    assert same.float().mean() > 0.999  # the order of the sum may change a rounding


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_beside_poison(device: str, dtype: torch.dtype) -> None:
    fused = _random((6, 104), dtype, device, 2)
    fused[:, :16], fused[:, 80:] = float("nan"), float("nan")
    weight, x = _random((64,), dtype, device, 3), fused[:, 16:80]
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.contiguous(), weight, 1e-6))
    heads = x.unflatten(1, (4, 16))  # QK norm: [T, heads, head_dim], part of a fused row
    assert torch.equal(rms_norm(heads, weight[:16], 1e-6), rms_norm(heads.contiguous(), weight[:16], 1e-6))
    got = rms_norm(heads, weight[:16], 1e-6, heads)
    want = rms_norm(heads.contiguous(), weight[:16], 1e-6, heads.contiguous())
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[0].isfinite().all()


@pytest.mark.parametrize("width", [96, 771, 2048])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(device: str, dtype: torch.dtype, width: int) -> None:
    x, weight = _random((17, width), dtype, device, 4), _random((width,), dtype, device, 5)
    whole = rms_norm(x, weight, 1e-5, x)
    for r in (1, 16):
        alone = rms_norm(x[-r:], weight, 1e-5, x[-r:])
        assert torch.equal(alone[0], whole[0][-r:]) and torch.equal(alone[1], whole[1][-r:])
