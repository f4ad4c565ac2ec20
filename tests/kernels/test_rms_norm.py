"""RMS norm compared with float64."""

from __future__ import annotations

import pytest
import torch

from kernels.rms_norm import rms_norm

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 4, 80), (0, 64), (2, 1000), (7, 33)])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_matches_float64(isa: str, dtype: torch.dtype, shape: tuple[int, ...], with_residual: bool, wide: bool) -> None:
    x, residual, weight = (torch.randn(s).to(dtype) for s in (shape, shape, shape[-1:]))
    weight = weight.float() if wide else weight
    summed = x + residual if with_residual else x
    exact = summed.double()
    want = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    if with_residual:
        got, new_residual = rms_norm(x, weight, 1e-5, residual)
        assert torch.equal(new_residual, summed)
    else:
        got = rms_norm(x, weight, 1e-5)
    assert got.shape == x.shape and got.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    assert torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance)


def test_strided_rows(native_isa: str) -> None:
    fused, weight = torch.randn(6, 100).bfloat16(), torch.randn(64).bfloat16()
    x = fused[:, 20:84]
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.contiguous(), weight, 1e-6))
    heads = fused[:, :64].unflatten(1, (4, 16))  # QK norm: [T, heads, head_dim], part of a fused row
    assert torch.equal(rms_norm(heads, weight[:16], 1e-6), rms_norm(heads.contiguous(), weight[:16], 1e-6))


def test_refuses_other_dtypes(isa: str) -> None:
    with pytest.raises(ValueError, match="weight"):
        rms_norm(torch.randn(2, 8), torch.randn(8).bfloat16(), 1e-5)
