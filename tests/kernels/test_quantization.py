"""Weights of 4 and 8 bits: rounding, and the products of every build compared with float64."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import cpu
from kernels.cpu import fallbacks
from kernels.linear import PackedLinear
from kernels.quantization import GROUPS, Bits, QuantizedWeight, merged, quantize

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


def random_weight(n_out: int, n_in: int, bits: Bits, group: int, *, wide: bool, offsets: bool) -> QuantizedWeight:
    shape, dtype = (n_out, -(-n_in // group)), torch.float32 if wide else torch.bfloat16
    limit = 1 << bits - 1
    values = torch.randint(-limit, limit, (n_out, n_in), dtype=torch.int8)
    added = torch.randn(shape).to(dtype) if offsets else None
    return QuantizedWeight(values, torch.randn(shape).to(dtype), added, bits, group)


def expected(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.dequantized(torch.float64).T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_and_form_against_float64(
    native_isa: str, dtype: torch.dtype, bits: Any, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
    n_in, n_out = data.draw(st.integers(1, 300), label="in"), data.draw(st.integers(1, 150), label="out")
    group = 8 * data.draw(st.integers(1, 20), label="group / 8")
    form = {name: data.draw(st.booleans(), label=name) for name in ("wide", "offsets")}
    weight = random_weight(n_out, n_in, bits, group, **form)
    bias = torch.randn(n_out).to(dtype) if data.draw(st.booleans(), label="bias") else None
    linear = PackedLinear([weight], bias, dtype=dtype)
    assert linear.how == f"int{bits}" and linear.is_packed
    x = torch.randn(40, n_in + 3).to(dtype)[:, 2 : n_in + 2]
    whole = linear(x)
    want = expected(x, weight, bias)
    assert whole.dtype == dtype and (whole - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
    for start, stop in ((0, 1), (5, 7), (3, 16), (0, 13), (39, 40)):
        assert torch.equal(linear(x[start:stop]), whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n_in", "n_out"), [(768, 3072), (2048, 770), (4096, 96)])
def test_large_matrices_on_two_threads(native_isa: str, dtype: torch.dtype, bits: Any, n_in: int, n_out: int) -> None:
    """The matrices are large enough for several slabs of rows and groups of panels, which threads share."""
    weight = random_weight(n_out, n_in, bits, 128, wide=False, offsets=True)
    linear, x = PackedLinear([weight], dtype=dtype), torch.randn(140, n_in).to(dtype)
    whole = linear(x)
    want = expected(x, weight, None)
    assert (whole - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 4, 6, 11, 12, 13, 25, 66):
            assert torch.equal(linear(x[:rows]), whole[:rows]), (threads, rows)
            assert torch.equal(linear(x[rows:]), whole[rows:]), (threads, rows, "from there on")


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_values_of_a_long_group_do_not_overflow(native_isa: str, bits: Any) -> None:
    """The AVX-512 build sums a group in 32-bit integers, in blocks of 256 inputs."""
    values = torch.full((16, 1000), -(1 << bits - 1), dtype=torch.int8)
    weight = QuantizedWeight(values, torch.ones(16, 1), None, bits, 1000)
    x = torch.full((3, 1000), 255 / 128, dtype=torch.bfloat16)
    want = expected(x, weight, None).bfloat16()
    assert torch.equal(PackedLinear([weight], dtype=torch.bfloat16)(x), want)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("largest", [64.0, 1000.0, 1e20, 1e-20])
def test_an_input_far_above_the_others_costs_them_less_than_its_own_rounding(
    native_isa: str, bits: Any, largest: float
) -> None:
    weight = random_weight(32, 128, bits, 128, wide=True, offsets=True)
    x = torch.randn(5, 128).bfloat16()
    x[:, 7] = largest
    difference = PackedLinear([weight], dtype=torch.bfloat16)(x).double() - expected(x, weight, None)
    rounding = 2**-9 * x.abs().amax(1).double()
    scale = weight.dequantized(torch.float64).abs().amax(1)
    assert (difference.abs() <= rounding[:, None] * scale + 2**-8 * expected(x, weight, None).abs()).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_row_with_infinity_or_nan_is_nan_and_others_are_not(native_isa: str, value: float) -> None:
    linear, x = PackedLinear([quantize(torch.randn(32, 256), 8)], dtype=torch.bfloat16), torch.randn(9, 256).bfloat16()
    want = linear(x)
    x[4, 200] = value
    found = linear(x)
    assert not torch.isfinite(found[4]).any() and torch.equal(found[:4], want[:4]) and torch.equal(found[5:], want[5:])


@pytest.mark.parametrize(("bits", "most"), [(8, 0.0075), (4, 0.11)])
def test_rounding_is_near_and_its_best_values_are_used(bits: Any, most: float) -> None:
    weight = torch.randn(64, 1000)
    rounded = quantize(weight, bits)
    assert rounded.shape == (64, 1000) and rounded.group == GROUPS[bits] and rounded.scales.dtype == torch.bfloat16
    error = (rounded.dequantized(torch.float32) - weight).square().mean().sqrt()
    assert error < most  # the standard deviation of the weights is 1
    limit = 127 if bits == 8 else 8
    assert int(rounded.values.abs().max()) == limit
    fewer = rounded.num_bytes / (2 * weight.numel())
    assert fewer == pytest.approx((bits + 16 / GROUPS[bits]) / 16, rel=0.03)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_keeps_zeros_and_extremes(bits: Any) -> None:
    weight = torch.zeros(3, 200)
    weight[1, 7], weight[2, :64] = -1e-3, 40.0
    found = quantize(weight, bits).dequantized(torch.float32)
    assert not found[0].any() and torch.isfinite(found).all()
    assert torch.allclose(found, weight, rtol=0.13 if bits == 4 else 0.01)
    assert torch.equal(quantize(weight.bfloat16(), bits).values, quantize(weight, bits).values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_of_several_forms_are_one_below_the_other(native_isa: str, dtype: Any) -> None:
    """Adjacent matrices of the same form become one matrix. The outputs of others start in the middle of a panel."""
    forms: list[tuple[int, Bits, int, bool, bool]] = [
        (24, 4, 32, True, True), (9, 4, 32, True, True), (7, 8, 32, True, True), (40, 8, 16, False, False),
        (1, 4, 96, False, True), (33, 4, 96, True, True),
    ]  # fmt: skip
    parts = [random_weight(n, 100, bits, group, wide=wide, offsets=off) for n, bits, group, wide, off in forms]
    assert [part.shape[0] for part in merged(parts)] == [33, 7, 40, 1, 33]
    x, bias = torch.randn(30, 100).to(dtype), torch.randn(sum(form[0] for form in forms)).to(dtype)
    linear = PackedLinear(parts, bias, dtype=dtype)
    want = torch.cat([expected(x, part, None) for part in parts], dim=1) + bias.double()
    assert linear.out_features == 114 and linear.how == "int4"
    assert ((linear(x) - want).abs() <= TOLERANCE[dtype] * want.abs().max()).all()
    assert torch.equal(linear(x[3:4]), linear(x)[3:4])
    alone = [PackedLinear([part], dtype=dtype)(x) for part in parts]
    assert torch.equal(torch.cat(alone, dim=1), PackedLinear(parts, dtype=dtype)(x))


@pytest.mark.parametrize("group", [0, 4, 12])
def test_groups_that_kernels_cannot_take_are_refused(group: int) -> None:
    values = torch.zeros(2, 24, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"group is .*, but must be a multiple of 8"):
        QuantizedWeight(values, torch.zeros(2, 6), None, 4, group)
    with pytest.raises(ValueError, match=r"scales are torch.float32 \[2, 6\], but must be torch.float32 \[2, 3\]"):
        QuantizedWeight(values, torch.zeros(2, 6), None, 4, 8)


def test_without_c_kernels_it_is_a_matrix_of_floats_which_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    weight = random_weight(20, 64, 4, 32, wide=True, offsets=True)
    with cpu.using("reference"), caplog.at_level(logging.WARNING, "looseleaf.kernels"):
        before = fallbacks().get("quantized linear", 0)
        linear = PackedLinear([weight], dtype=torch.float32)
        assert linear.how not in ("int4", "int8") and fallbacks()["quantized linear"] == before + 1
        x = torch.randn(3, 64)
        assert torch.allclose(linear(x).double(), expected(x, weight, None), rtol=1e-4, atol=1e-4)


def test_inputs_of_another_dtype_are_refused() -> None:
    linear = PackedLinear([quantize(torch.randn(16, 64), 8)], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"x is torch.float32, but the weight was packed for torch.bfloat16"):
        linear(torch.randn(2, 64))
