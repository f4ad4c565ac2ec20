"""The linear layer with fixed tiles, compared with float64 for odd sizes, and a row's bits alone, in a batch and in a
prompt.
"""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.linear import FEW_ROWS, NARROW, TILES, WIDE, fixed_tile, linear, tile_of, tiles_agree
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


def test_the_fixed_tile_fills_the_chip() -> None:
    """4,096 columns need the narrowest tile; the columns of a wide MLP do not."""
    assert [fixed_tile(n).columns for n in (4096, 6144, 14_336, 28_672, 128_256)] == [32, 32, 64, 128, 128]


def test_the_tile_suits_the_number_of_rows() -> None:
    assert [tile_of(rows, 4096) for rows in (1, 16, 17, 33, 64, 512)] == [
        FEW_ROWS[0], FEW_ROWS[0], FEW_ROWS[1], NARROW, NARROW, WIDE[0],
    ]  # fmt: skip
    assert [tile_of(rows, 28_672) for rows in (16, 64, 65)] == [FEW_ROWS[0], WIDE[1], WIDE[0]]
    assert {tile_of(rows, out) for rows in range(1, 1000) for out in (64, 4096, 28_672)} == set(TILES)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_tile_gives_the_same_bits_on_a_gpu(device: str, dtype: torch.dtype) -> None:
    if device == "cpu":
        assert not tiles_agree(torch.device("cpu"), dtype)
        pytest.skip("the interpreter multiplies with numpy, whose order of summation depends on the shape")
    for n_in, n_out in ((4096, 1024), (14_336, 512), (150, 70)):
        x, weight, bias = _make((1100,), n_in, n_out, dtype, device)
        first, *others = (linear(x, weight, bias, tile=tile) for tile in (*TILES, fixed_tile(n_out)))
        assert all(torch.equal(first, other) for other in others)
        assert tiles_agree(x.device, dtype)
        for rows in (1, 16, 17, 64, 65, 300):
            assert torch.equal(linear(x[:rows], weight, bias), first[:rows])


def test_refuses_what_does_not_fit(device: str) -> None:
    x, weight, bias = _make((2,), 8, 4, torch.float32, device)
    for arguments in ((x[:, :7], weight), (x.bfloat16(), weight), (x, weight, bias.bfloat16())):
        with pytest.raises(ValueError, match="must fit"):
            linear(*arguments)
