"""Packed linear layers compared with float64, and a row's bits, which do not depend on other rows or threads."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import cpu, linear
from kernels.cpu import amx, fallbacks
from kernels.linear import PackedLinear, provider_of

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [
    (64, 192),
    (96, 96),
    (80, 100),
    (64, 1000),
    (768, 1280),
    (768, 4096),
    (2048, 768),
    (1024, 1024),
    (64, 32000),
    (768, 32000),
]
ROWS = [1, 2, 3, 5, 8, 15, 16, 17, 33, 64, 127, 256, 257, 511, 1024]


def make(n_in: int, n_out: int, dtype: torch.dtype, bias: bool = True) -> tuple[PackedLinear, torch.Tensor, torch.Tensor | None]:  # fmt: skip  # noqa: E501
    weight = (torch.randn(n_out, n_in) / n_in**0.5).to(dtype)
    b = torch.randn(n_out).to(dtype) if bias else None
    return PackedLinear(weight, b), weight, b


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 64), (0, 64), (64,)])
def test_matches_float64(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    linear, weight, b = make(64, 100, dtype, bias)
    assert linear.is_packed and linear.weight is None
    x = torch.randn(shape).to(dtype)
    want = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    got = linear(x)
    assert got.shape == want.shape and got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_in", "n_out"), SHAPES)
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype, n_in: int, n_out: int) -> None:
    linear, _, _ = make(n_in, n_out, dtype)
    rows = [r for r in ROWS if r * n_in * n_out <= 2**30]
    x = torch.randn(rows[-1], n_in).to(dtype)
    whole = linear(x)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for r in rows:
            assert torch.equal(linear(x[:r]), whole[:r]), (threads, r)
            assert torch.equal(linear(x[-r:]), whole[-r:]), (threads, r, "from the end")


@pytest.mark.skipif(not amx.available(), reason="this CPU has no AMX")
def test_amx_is_taken_where_it_fits() -> None:
    weight = torch.randn(33, 64)
    assert PackedLinear(weight.bfloat16(), provider="amx").how == "amx"
    assert PackedLinear(weight, provider="amx").how == "torch"
    assert PackedLinear(torch.randn(33, 80).bfloat16(), provider="amx").how == "torch"


@pytest.mark.skipif(not amx.available(), reason="this CPU has no AMX")
@pytest.mark.parametrize("scale", [1.0, 1e-19, 1e-38, 1e30], ids=str)
@pytest.mark.parametrize("n_out", [7, 33, 64, 97, 1000, 1280])
def test_one_and_two_rows_have_the_bits_of_amx_tiles(n_out: int, scale: float) -> None:
    """One and two rows are multiplied in vectors, more rows in tiles, which take denormal numbers as zero and have an
    order of additions of their own.
    """
    weight = (torch.randn(n_out, 768) * (scale if scale == 1e-19 else 1.0)).bfloat16()
    x, bias = (torch.randn(20, 768) * scale).bfloat16(), (torch.randn(n_out) * scale).bfloat16()
    for b in (None, bias):
        linear = PackedLinear(weight, b, provider="amx")
        whole = linear(x)
        assert linear.how == "amx"
        for rows in (1, 2):
            for first in range(len(x) - rows + 1):
                alone = linear(x[first : first + rows])
                assert torch.equal(alone.view(torch.int16), whole[first : first + rows].view(torch.int16))


def test_rows_of_a_strided_input() -> None:
    linear, _, _ = make(64, 100, torch.bfloat16)
    x = torch.randn(40, 96).to(torch.bfloat16)[:, 16:80]
    assert torch.equal(linear(x), linear(x.contiguous()))
    x = torch.randn(64, 40).to(torch.bfloat16).T
    assert torch.equal(linear(x), linear(x.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 100), (1, 1), (7, 33), (97, 15), (768, 1280), (2048, 130)])
def test_vectors_of_every_build(native_isa: cpu.Isa, dtype: torch.dtype, n_in: int, n_out: int) -> None:
    """Odd shapes and strided rows are compared with float64. The bits are the same alone and in a batch, with 1 and 2
    threads.
    """
    weight, b = (torch.randn(n_out, n_in) / n_in**0.5).to(dtype), torch.randn(n_out).to(dtype)
    x = torch.randn(140, n_in + 3).to(dtype)[:, 2 : n_in + 2]  # more than one slab of the longest rows
    for bias in (None, b):
        linear = PackedLinear(weight, bias, provider="simd")
        whole = linear(x)
        assert linear.how == "simd"
        want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert (whole - want).abs().max() <= tolerance * want.abs().max()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 66):
                assert torch.equal(linear(x[:rows]), whole[:rows]), (threads, rows)
                assert torch.equal(linear(x[rows:]), whole[rows:]), (threads, rows, "from there on")


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Resets the choice of providers before and after the test. The test's own process chooses."""
    monkeypatch.delenv("KERNELS_CHOICES", raising=False)
    linear._preferred.cache_clear()
    yield
    linear._preferred.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
def test_ours_is_taken_unless_onednn_is_measured_to_be_faster(
    dtype: torch.dtype, choosing: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The measured times decide on any CPU, and the choice is logged once."""
    if PackedLinear(torch.zeros(32, 32, dtype=dtype), provider="onednn").how != "onednn":
        pytest.skip(f"oneDNN has no {dtype} on this CPU")
    ours = "amx" if dtype == torch.bfloat16 and amx.available() else "simd"
    for own_s, expected in ((linear.SLOWER * 0.99, ours), (linear.SLOWER * 1.01, "onednn")):
        monkeypatch.setattr(linear, "times_of", lambda *_, own_s=own_s: [own_s, 1.0])
        linear._preferred.cache_clear()
        with caplog.at_level(logging.INFO, "looseleaf.kernels"):
            assert provider_of(dtype) == provider_of(dtype) == expected
        assert len(caplog.records) == 1 and f"run on {expected}" in caplog.text
        caplog.clear()


def test_the_first_choice_in_a_directory_is_everybodys(
    choosing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if PackedLinear(torch.zeros(32, 32), provider="onednn").how != "onednn":
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setenv("KERNELS_CHOICES", str(tmp_path))
    for own_s, expected in ((9.0, "onednn"), (0.1, "onednn")):  # the second process measures something else
        monkeypatch.setattr(linear, "times_of", lambda *_, own_s=own_s: [own_s, 1.0])
        linear._preferred.cache_clear()
        assert provider_of(torch.float32) == expected
    assert [path.read_text() for path in tmp_path.iterdir()] == ["onednn"]
    monkeypatch.setenv("KERNELS_CHOICES", str(tmp_path / "not there"))
    linear._preferred.cache_clear()
    before = fallbacks().get("linear choice", 0)
    assert provider_of(torch.float32) == "simd" and fallbacks()["linear choice"] == before + 1


def test_what_takes_longer_is_measured_to_take_longer() -> None:
    """Measures one real product and thirty of them."""
    product = PackedLinear(torch.randn(linear.TIMED_SHAPE), provider="simd")
    once, often = linear.times_of([product, lambda x: [product(x) for _ in range(30)][-1]], torch.float32)
    assert 5 * once < often
    assert torch.get_num_threads() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_processes_choose_alike(
    dtype: torch.dtype, choosing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes choose at the same time, like workers that start together. With different choices, they could not
    share blocks.
    """
    monkeypatch.setenv("KERNELS_CHOICES", str(tmp_path))
    program = f"import torch; from kernels.linear import provider_of; print(provider_of({dtype}))"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert len({process.communicate(timeout=200)[0] for process in both} | {provider_of(dtype) + "\n"}) == 1


def test_packing_takes_no_more_than_the_weight() -> None:
    packed = PackedLinear(torch.randn(96, 64).bfloat16(), provider="simd").packed
    assert packed is not None and packed.untyped_storage().nbytes() == 96 * 64 * 2


def test_a_provider_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(8, 16)
    monkeypatch.setenv("KERNELS_LINEAR", "simd")
    assert PackedLinear(weight).how == "simd"
    assert PackedLinear(weight, provider="torch").how == "torch"
    monkeypatch.setenv("KERNELS_LINEAR", "fast")
    with pytest.raises(ValueError, match="KERNELS_LINEAR is 'fast', but must be one of amx, onednn, simd, torch"):
        PackedLinear(weight)


def test_what_cannot_be_packed_is_counted() -> None:
    before = fallbacks().get("linear", 0)
    weight = torch.randn(8, 16, dtype=torch.float64)
    linear = PackedLinear(weight)
    x = torch.randn(3, 16, dtype=torch.float64)
    assert not linear.is_packed and torch.equal(linear(x), x @ weight.T)
    assert fallbacks()["linear"] == before + 1


def test_keeps_the_weight_only_when_asked() -> None:
    weight = torch.randn(8, 16)
    assert PackedLinear(weight).weight is None
    kept = PackedLinear(weight, keep_weight=True).weight
    assert kept is not None and kept.data_ptr() == weight.data_ptr()
