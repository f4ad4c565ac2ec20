"""LoRA corrections compared with float64: odd shapes, ranks and mixtures of adapters; rows without adapters keep their
bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.lora import LoraPart, LoraRows, LoraWeights, lora, lora_by_adapter

OUTS = (50, 16, 33)


def adapter(rank: int, n_in: int, dtype: torch.dtype, outs: tuple[int, ...] = OUTS) -> LoraWeights:
    """Returns an adapter for the second of two products, in which every projection has a different scale."""
    starts = np.cumsum((0, *outs[:-1])).tolist()
    parts = [
        LoraPart(torch.randn(rank, n_in).to(dtype), (torch.randn(rank, out) / rank).to(dtype), at, 0.5 + at / 100)
        for out, at in zip(outs, starts, strict=True)
    ]
    return LoraWeights([(), parts])


def corrected_f64(x: Tensor, out: Tensor, weights: LoraWeights) -> Tensor:
    got = out.double().clone()
    for part in weights.products[1]:
        got[:, part.at : part.at + part.b.shape[1]] += x.double() @ part.a.double().T @ part.b.double() * part.scale
    return got


@pytest.mark.parametrize("compute", [lora, lora_by_adapter])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "n_in"), [(1, 64), (16, 320), (7, 129), (64, 5)])
def test_matches_float64(isa: str, dtype: torch.dtype, rank: int, n_in: int, compute: Any) -> None:
    torch.manual_seed(0)
    adapters = [adapter(rank, n_in, dtype), adapter(2 * rank, n_in, dtype)]
    of_row = np.array([0, -1, 1, 0, 0, 1, 0, 0, -1, 0], np.int32)
    x, out = torch.randn(10, n_in).to(dtype), torch.randn(10, sum(OUTS) + 3).to(dtype)
    before = out.clone()
    compute(x, out, LoraRows(adapters, of_row), 1)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for row, index in enumerate(of_row):
        want = before[row].double() if index < 0 else corrected_f64(x, before, adapters[index])[row]
        scale = (x[row].double().norm() + 1) if index >= 0 else 0.0
        assert (out[row].double() - want).abs().max() <= tolerance * scale
    assert torch.equal(out[:, sum(OUTS) :], before[:, sum(OUTS) :])


def test_a_site_without_parts_is_not_changed(isa: str) -> None:
    x, out = torch.randn(3, 64), torch.randn(3, 99)
    before = out.clone()
    lora(x, out, LoraRows([adapter(4, 64, torch.float32)], np.zeros(3, np.int32)), 0)
    assert torch.equal(out, before)


def test_refuses_what_the_kernel_cannot_read() -> None:
    with pytest.raises(ValueError, match="rank"):
        LoraPart(torch.zeros(513, 4), torch.zeros(513, 4), 0, 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        LoraPart(torch.zeros(4, 8).T, torch.zeros(8, 4), 0, 1.0)
    with pytest.raises(ValueError, match="at most 3 parts"):
        LoraWeights([[LoraPart(torch.zeros(1, 4), torch.zeros(1, 4), 0, 1.0)] * 4])
