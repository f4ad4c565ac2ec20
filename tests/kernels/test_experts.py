"""The choice of experts compared with torch, and the bound on logits."""

from __future__ import annotations

import pytest
import torch

from kernels.experts import route, route_reference
from kernels.softcap import softcap_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "per_token"), [(4, 2), (128, 8), (5, 5), (1, 1)])
@pytest.mark.parametrize(("renormalize", "round_weights"), [(True, False), (False, True)])
def test_choices_and_weights_are_those_of_torch(
    isa: str, dtype: torch.dtype, experts: int, per_token: int, renormalize: bool, round_weights: bool
) -> None:
    permuted = torch.stack([torch.randperm(experts) for _ in range(33)])
    scores = (permuted / 16).to(dtype)  # no two scores of a row are equal
    how = {"renormalize": renormalize, "round_weights": round_weights}
    weights, chosen = route(scores, per_token, **how)
    want, expected = route_reference(scores, per_token, **how)
    assert torch.equal(chosen, expected)
    assert torch.allclose(weights, want, rtol=1e-2 if round_weights and dtype == torch.bfloat16 else 1e-6)
    assert not round_weights or torch.equal(weights, weights.to(dtype).float())


def test_of_equal_experts_the_first_are_taken(native_isa: str) -> None:
    weights, chosen = route(torch.zeros(3, 6), 2, renormalize=True, round_weights=False)
    assert chosen.tolist() == [[0, 1]] * 3 and weights.tolist() == [[0.5, 0.5]] * 3


def test_a_softcap_is_a_scaled_tanh(isa: str) -> None:
    x = torch.cat((torch.randn(1001) * 40, torch.tensor([1e30, -1e30, 0.0])))
    got = softcap_(x.clone(), 30.0)
    assert torch.allclose(got.double(), 30 * torch.tanh(x.double() / 30), rtol=2e-6, atol=2e-6)
    with pytest.raises(ValueError, match="contiguous fp32"):
        softcap_(x.bfloat16(), 30.0)
