"""silu(gate) * up and gelu(gate) * up compared with float64, including extreme values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gelu_mul import gelu_mul
from kernels.silu_mul import silu_mul

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (5, 130), (2, 3, 64), (0, 64), (9, 2 * 1001)])
def test_matches_float64(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (3 * torch.randn(shape)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    got = silu_mul(x)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-2
    assert got.shape == up.shape and torch.allclose(got.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 130), (2, 3, 64), (0, 64), (9, 2 * 1001)])
def test_gelu_matches_float64(isa: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (3 * torch.randn(shape)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    got, want = gelu_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert got.shape == up.shape
    assert torch.allclose(got.double(), want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize("function", [silu_mul, gelu_mul])
def test_extremes_stay_finite(isa: str, function: Any) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -0.0, 90.0, 200.0, 1e30, float("nan")])
    got = function(torch.cat((gate, torch.ones(8)))[None])[0]
    assert got[:4].abs().max() < 1e-30 and torch.equal(got[4:7], gate[4:7]) and got[7].isnan()


def test_refuses_odd_width(isa: str) -> None:
    with pytest.raises(ValueError, match="must be even"):
        silu_mul(torch.randn(2, 7))
