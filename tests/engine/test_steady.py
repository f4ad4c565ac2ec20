"""Elementwise functions on a CPU: an element's bits do not depend on its position, its neighbors or threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.foreign.steady import PIECE, Steady, steadily

FUNCTIONS = {"sigmoid": torch.sigmoid, "silu": F.silu, "gelu": F.gelu, "tanh": torch.tanh, "cos": torch.Tensor.cos}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 100, 3000])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_element_has_the_bits_it_has_alone(name: str, width: int, dtype: torch.dtype) -> None:
    function, threads = FUNCTIONS[name], torch.get_num_threads()
    x = (4 * torch.randn(300, width)).to(dtype)
    try:
        with Steady():
            whole = function(x)
            torch.set_num_threads(3)
            assert torch.equal(function(x), whole)
            assert torch.equal(function(x.T.contiguous().T), whole), "in another layout"
            for row in range(0, 300, 37):
                assert torch.equal(function(x[row : row + 1])[0], whole[row])
    finally:
        torch.set_num_threads(threads)
    assert (whole.float() - function(x).float()).abs().max() < 0.02


def test_torch_alone_does_not_keep_them() -> None:
    """Checks that `engine.foreign.steady` is necessary on AVX2 and AVX-512 machines."""
    x = 4 * torch.randn(2000, 7)
    assert any(not torch.equal(F.silu(x[i : i + 1])[0], F.silu(x)[i]) for i in range(2000))


def test_in_place_and_by_name_and_beyond_a_piece() -> None:
    x = torch.randn(PIECE + 5)
    with Steady():
        assert torch.equal(F.silu(input=x, inplace=True), steadily(F.silu, x))
        assert torch.sigmoid(torch.empty(0)).shape == (0,)
