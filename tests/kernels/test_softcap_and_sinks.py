"""Softcap and attention sinks compared with float64 in decode and prefill, and the bits of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = (torch.float32, torch.bfloat16)
LENS = [1, 17, 256, 700]
HEADS, KV_HEADS, DIM = 6, 2, 64
SCALE = 0.5
"""A scale that is large enough for scores to reach the cap."""
KINDS = [(5.0, False, None), (None, True, None), (5.0, True, None), (30.0, True, 100)]


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softcap: float | None, sinks: Any, window: int | None
) -> torch.Tensor:
    """Returns attention [heads, d] in float64, for q [heads, d] at the last position and keys and values [n, kv_heads,
    d].
    """
    group, out = HEADS // KV_HEADS, []
    for head in range(HEADS):
        k, v = keys[:, head // group].double(), values[:, head // group].double()
        first = 0 if window is None else max(0, len(k) - window)
        scores = k[first:] @ q[head].double() * SCALE
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1].double()))
        out.append(torch.softmax(scores, 0)[: len(k) - first] @ v[first:])
    return torch.stack(out)


def case_of(scatter: Any, dtype: torch.dtype, with_sinks: bool, window: int | None) -> tuple[Any, torch.Tensor, Any]:
    case = scatter(LENS, KV_HEADS, DIM, 16, dtype, window=window)
    sinks = torch.tensor([-3.0, 0.0, 2.0, 5.0, 9.0, 40.0]) if with_sinks else None
    return case, torch.randn(len(LENS), HEADS, DIM).to(dtype), sinks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "with_sinks", "window"), KINDS)
def test_matches_float64(
    isa: str, scatter: Any, dtype: torch.dtype, softcap: float | None, with_sinks: bool, window: int | None
) -> None:
    case, q, sinks = case_of(scatter, dtype, with_sinks, window)
    where = (case.key_cache, case.value_cache, case.block_table, case.context_lens)
    how: dict[str, Any] = {"softmax_scale": SCALE, "window": window}
    got = paged_attention(q, *where, **how, softcap=softcap, sinks=sinks)
    plain = paged_attention(q, *where, **how)
    for i in range(len(LENS)):
        want = attend(q[i], case.keys[i], case.values[i], softcap, sinks, window)
        assert (got[i].double() - want).abs().max() <= TOLERANCE[dtype] * max(1.0, float(want.abs().max()))
    assert (got.float() - plain.float()).abs().max() > 0.1, "without them it would be the same"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "with_sinks", "window"), KINDS)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_a_chunk(
    native_isa: str, scatter: Any, dtype: torch.dtype, softcap: float | None, with_sinks: bool, window: int | None
) -> None:
    case, q, sinks = case_of(scatter, dtype, with_sinks, None)  # other rows of a chunk see earlier keys
    how: dict[str, Any] = {"softmax_scale": SCALE, "window": window, "softcap": softcap, "sinks": sinks}
    together = paged_attention(q, case.key_cache, case.value_cache, case.block_table, case.context_lens, **how)
    for i, length in enumerate(LENS):
        where = (case.key_cache, case.value_cache, case.block_table[i : i + 1], case.context_lens[i : i + 1])
        assert torch.equal(paged_attention(q[i : i + 1], *where, **how)[0], together[i])
        rows = min(length, 5)
        chunk = torch.cat((torch.randn(rows - 1, HEADS, DIM).to(dtype), q[i : i + 1]))
        cu = torch.tensor([0, rows], dtype=torch.int32)
        assert torch.equal(paged_prefill(chunk, *where, cu, **how)[-1], together[i])


def test_wrong_arguments_are_refused(isa: str, scatter: Any) -> None:
    case, q, _ = case_of(scatter, torch.float32, False, None)
    where = (case.key_cache, case.value_cache, case.block_table, case.context_lens)
    with pytest.raises(ValueError, match="softcap must be positive"):
        paged_attention(q, *where, softmax_scale=1.0, softcap=0.0)
    for sinks in (torch.zeros(HEADS - 1), torch.zeros(HEADS, dtype=torch.bfloat16), torch.zeros(2 * HEADS)[::2]):
        with pytest.raises(ValueError, match="sinks must be fp32"):
            paged_attention(q, *where, softmax_scale=1.0, sinks=sinks)
