"""Prefill attention compared with float64. Its bits are those of decode for any chunks, which is the basis of promise
1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = (torch.float32, torch.bfloat16)


def starts(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(2, 2, 16), (8, 2, 64), (7, 1, 80)])
def test_matches_float64(isa: str, scatter: Any, attend_f64: Any, dtype: Any, window: int | None, heads: int, kv_heads: int, d: int) -> None:  # fmt: skip  # noqa: E501
    contexts, chunks = [1, 31, 0, 300, 17, 530], [1, 31, 0, 40, 1, 70]
    case = scatter(contexts, kv_heads, d, 16, dtype)
    q = torch.randn(sum(chunks), heads, d).to(dtype)
    cu = starts(chunks)
    where = (case.key_cache, case.value_cache, case.block_table, case.context_lens)
    got = paged_prefill(q, *where, cu, softmax_scale=d**-0.5, window=window)
    assert got.isfinite().all()
    for i in range(len(contexts)):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        want = attend_f64(q[rows], case.keys[i], case.values[i], d**-0.5, window)
        if chunks[i]:
            worst = (got[rows].double() - want).abs().max()
            assert worst <= TOLERANCE[dtype] * max(1.0, float(want.abs().max()))


def prefix(case: Any, i: int, n: int) -> tuple[torch.Tensor, ...]:
    return case.key_cache, case.value_cache, case.block_table[i : i + 1], torch.tensor([n], dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chunking_gives_the_bits_of_decode(native_isa: str, scatter: Any, dtype: Any, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 600), label="length")
    window = data.draw(st.sampled_from([None, 1, 37, 256]), label="window")
    shapes = [(2, 2, 16), (12, 4, 64), (7, 1, 8), (50, 1, 24), (9, 1, 32), (34, 2, 96)]
    heads, kv_heads, d = data.draw(st.sampled_from(shapes), label="heads")
    block_size = data.draw(st.sampled_from([4, 16, 32]), label="block_size")
    case = scatter([n], kv_heads, d, block_size, dtype, seed=data.draw(st.integers(0, 99), label="seed"))
    q = torch.randn(n, heads, d, generator=torch.Generator().manual_seed(n)).to(dtype)
    scale = d**-0.5
    whole = paged_prefill(q, *prefix(case, 0, n), starts([n]), softmax_scale=scale, window=window)
    done = 0
    while done < n:
        step = data.draw(st.integers(1, n - done), label="chunk")
        torch.set_num_threads(data.draw(st.integers(1, 2), label="threads"))
        rows = slice(done, done + step)
        chunk = paged_prefill(
            q[rows], *prefix(case, 0, done + step), starts([step]), softmax_scale=scale, window=window
        )
        assert torch.equal(chunk, whole[rows])
        done += step
    for p in data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5), label="positions"):
        one = paged_attention(q[p : p + 1], *prefix(case, 0, p + 1), softmax_scale=scale, window=window)
        assert torch.equal(one[0], whole[p])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixed_batch_has_the_bits_of_each_alone(native_isa: str, scatter: Any, dtype: Any) -> None:
    contexts, chunks = [5, 300, 64, 700], [1, 300, 20, 1]
    case = scatter(contexts, 2, 64, 16, dtype)
    q = torch.randn(sum(chunks), 6, 64).to(dtype)
    cu = starts(chunks)
    where = (case.key_cache, case.value_cache, case.block_table, case.context_lens)
    mixed = paged_prefill(q, *where, cu, softmax_scale=0.125)
    torch.set_num_threads(1)
    for i, n in enumerate(contexts):
        rows = slice(int(cu[i]), int(cu[i + 1]))
        alone = paged_prefill(q[rows], *prefix(case, i, n), starts([chunks[i]]), softmax_scale=0.125)
        assert torch.equal(mixed[rows], alone)


def test_refuses_bad_starts(native_isa: str, scatter: Any) -> None:
    case = scatter([20], 1, 16, 16, torch.float32)
    q = torch.randn(4, 1, 16)
    for bad in ([0, 5], [1, 4]):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            paged_prefill(q, *prefix(case, 0, 20), torch.tensor(bad, dtype=torch.int32), softmax_scale=1.0)
    with pytest.raises(ValueError, match="longer than its context"):
        paged_prefill(q, *prefix(case, 0, 3), starts([4]), softmax_scale=1.0)
