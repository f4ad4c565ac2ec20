"""Operations in fp32 whose bits are those of torch, so that fp32 logits are close to those of transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu import Isa
from kernels.experts import route, route_reference
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import rms_norm, rms_norm_reference
from kernels.silu_mul import silu_mul, silu_mul_reference

TOKENS, BLOCK, DIM, HEADS = 150, 16, 160, 2
"""DIM exceeds the number of tokens, so that values can be unit vectors and an output is a row's weights."""


def same_vectors(isa: Isa) -> bool:
    """Returns whether a build's vectors are as long as torch's on this CPU. Otherwise sums over lanes differ."""
    return isa.upper() == torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize("width", [17, 24, 64, 768, 1000, 8192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
def test_norms(native_isa: Isa, width: int, dtype: torch.dtype, wide: bool) -> None:
    x, residual, weight = (torch.randn(size).to(dtype) for size in ((64, width), (64, width), (width,)))
    weight = weight.float() if wide else weight
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    assert torch.equal(rms_norm(x, weight, 1e-5, residual)[0], rms_norm_reference(x, weight, 1e-5, residual)[0])


def test_silu(native_isa: Isa) -> None:
    """The portable build has no fused multiply-add."""
    x = torch.cat((torch.randn(40, 512) * 8, torch.linspace(-88, 88, 40 * 512).view(40, 512)), dim=1)
    got, want = silu_mul(x), silu_mul_reference(x)
    assert torch.equal(got, want) or (native_isa == "portable" and torch.allclose(got, want, rtol=1e-6, atol=1e-30))


@pytest.mark.parametrize("experts", [4, 8, 60, 128])
@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_of_experts(native_isa: Isa, experts: int, renormalize: bool) -> None:
    scores = torch.randn(200, experts) * 3
    weights, chosen = route(scores, 2, renormalize=renormalize, round_weights=False)
    want, expected = route_reference(scores, 2, renormalize=renormalize, round_weights=False)
    assert torch.equal(chosen, expected)
    assert torch.equal(weights, want) or (not same_vectors(native_isa) and torch.allclose(weights, want, rtol=1e-6))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_weights_of_attention(native_isa: Isa, with_sinks: bool, window: int | None) -> None:
    """Contexts of at most 256 tokens. Queries and keys are small integers, so scores are exact in any order. A sink
    follows a row's last key, as when transformers decodes token by token.
    """
    q = torch.randint(-3, 4, (TOKENS, HEADS, DIM)).float()
    keys, sinks = torch.randint(-3, 4, (BLOCK * 10, DIM)).float(), torch.tensor([-2.0, 30.0])
    caches = [x.view(10, BLOCK, 1, DIM).transpose(1, 2) for x in (keys, torch.eye(BLOCK * 10, DIM))]
    lens, cu = torch.tensor([TOKENS], dtype=torch.int32), torch.tensor([0, TOKENS], dtype=torch.int32)
    table = torch.arange(10, dtype=torch.int32)[None]
    got = paged_prefill(
        q, *caches, table, lens, cu, softmax_scale=0.07, window=window, sinks=sinks if with_sinks else None
    )
    position, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    hidden = (key > position) | (key <= position - (window or TOKENS))
    for head in range(HEADS):
        scores = (q[:, head] @ keys[:TOKENS].T * 0.07).masked_fill(hidden, float("-inf"))
        scores = F.pad(scores, (0, 1), value=float("-inf"))
        if with_sinks:
            scores.scatter_(1, position + 1, sinks[head].expand(TOKENS, 1))
        weights = scores.softmax(dim=-1)
        if with_sinks:
            weights.scatter_(1, position + 1, 0.0)
        found, want = got[:, head, :TOKENS], weights[:, :TOKENS]
        assert torch.equal(found, want) or (not same_vectors(native_isa) and torch.allclose(found, want, rtol=3e-6))
