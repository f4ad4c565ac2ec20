"""The linear layer with fixed tiles, compared with float64 for odd sizes, and a row's bits alone, in a batch and in a
prompt.
"""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.linear import constexprs, linear
from testing.gpu_kernels import rounded

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _make(rows: tuple[int, ...], n_in: int, n_out: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((*rows, n_in), (n_out, n_in), (n_out,))
    x, weight, bias = (torch.randn(shape, generator=g) for shape in shapes)
    return [t.to(dtype).to(device) for t in (x, weight / n_in**0.5, bias)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "n_in", "n_out"),
    [((1,), 64, 64), ((2, 3), 33, 70), ((0,), 64, 8), ((), 96, 33), ((65,), 100, 40), ((130,), 128, 257)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_matches_float64_rounded_once(
    device: str, dtype: torch.dtype, rows: tuple[int, ...], n_in: int, n_out: int, with_bias: bool
) -> None:
    x, weight, bias = _make(rows, n_in, n_out, dtype, device)
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    got = linear(x, weight, bias if with_bias else None)
    assert got.shape == want.shape and got.dtype == dtype
    if dtype == torch.float32:
        assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)
    elif got.numel():
        assert (got == rounded(want, dtype)).float().mean() > 0.98  # fp32's error changes only a few roundings
        assert torch.allclose(got.double(), want, rtol=1e-2, atol=1e-3)


def test_small_numbers_survive_a_long_sum(device: str) -> None:
    """The sum must be fp32: in bf16, each of the 4,096 ones that are added to 4,096 would be lost."""
    x = torch.ones(1, 4097, device=device, dtype=torch.bfloat16)
    x[0, 0] = 4096
    assert linear(x, torch.ones(32, 4097, device=device, dtype=torch.bfloat16)).eq(8192).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch(device: str, dtype: torch.dtype) -> None:
    x, weight, bias = _make((133,), 150, 70, dtype, device)
    whole = linear(x, weight, bias)
    for r in (1, 2, 16, 64, 65):
        assert torch.equal(linear(x[:r], weight, bias), whole[:r]), r
        assert torch.equal(linear(x[-r:], weight, bias), whole[-r:]), r


def test_strided_rows_beside_poison(device: str) -> None:
    x, weight, bias = _make((9,), 150, 70, torch.float32, device)
    wide, tall = torch.full((9, 200), float("nan")).to(device), torch.full((80, 170), float("nan")).to(device)
    wide[:, 8:158], tall[:70, :150] = x, weight
    assert torch.equal(linear(wide[:, 8:158], tall[:70, :150], bias), linear(x, weight, bias))


def test_the_tile_of_columns_fills_the_chip() -> None:
    """4,096 columns need the narrowest tile; the columns of a wide MLP do not. The number of rows has no effect."""
    assert [constexprs(n, False)["BLOCK_N"] for n in (4096, 6144, 14_336, 28_672, 128_256)] == [32, 32, 64, 128, 128]


def test_refuses_what_does_not_fit(device: str) -> None:
    x, weight, bias = _make((2,), 8, 4, torch.float32, device)
    for arguments in ((x[:, :7], weight), (x.bfloat16(), weight), (x, weight, bias.bfloat16())):
        with pytest.raises(ValueError, match="must fit"):
            linear(*arguments)
