"""silu(gate) * up in Triton: comparison with float64, extreme values, strided rows, a row's bits in any batch."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.silu_mul import gelu_mul, silu_mul
from testing.gpu_kernels import tolerance_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (5, 130), (2, 3, 64), (0, 64), (3, 2 * 1001), (2, 2 * 5000), (24,), (3, 0)])
def test_matches_float64(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = _random(shape, dtype, device)
    gate, up = x.double().chunk(2, -1)
    got = silu_mul(x)
    assert got.shape == up.shape and got.dtype == dtype
    assert torch.allclose(got.double(), gate * gate.sigmoid() * up, rtol=tolerance_of(dtype), atol=1e-6)
    want = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert torch.allclose(gelu_mul(x).double(), want, rtol=max(1e-5, tolerance_of(dtype)), atol=1e-5)


def test_extremes_stay_finite(device: str) -> None:
    gate = torch.tensor([-1e30, -200.0, -90.0, -0.0, 90.0, 200.0, 1e30, float("nan")])
    got = silu_mul(torch.cat((gate, torch.ones(8)))[None].to(device))[0].cpu()
    assert got[:4].abs().max() < 1e-30 and torch.equal(got[4:7], gate[4:7]) and got[7].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(device: str, dtype: torch.dtype) -> None:
    wide = _random((33, 2 * 333 + 5), dtype, device)
    wide[:, 2 * 333 :] = float("nan")
    x = wide[:, : 2 * 333]
    whole = silu_mul(x)
    assert whole.isfinite().all()
    for r in (1, 7, 16):
        assert torch.equal(silu_mul(x[-r:]), whole[-r:])
