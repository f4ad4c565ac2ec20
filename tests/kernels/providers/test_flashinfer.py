"""The plans for FlashInfer. The wrappers in this file have the signatures of 0.6.9. They compute with our reference
from the plan, and read it from the buffers that a CUDA graph would read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention_reference import paged_prefill_reference
from kernels.providers.base import AttentionSpec, HostBatch, Unavailable
from kernels.providers.flashinfer import FlashInferAttention, ragged

Caches = tuple[Tensor, Tensor]


def attend(
    q: Tensor, caches: Caches, lists: tuple[Tensor, Tensor, Tensor], starts: Tensor, scale: float, left: int
) -> Tensor:
    """Computes attention from a block table, which it converts from ragged lists. Unused entries are -1, so reading one
    is an error.
    """
    block_starts, blocks, last_lens = lists
    counts = block_starts.diff()
    table = torch.full((len(counts), int(counts.max()) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(counts.tolist()):
        table[row, :count] = blocks[int(block_starts[row]) :][:count]
    lens = torch.where(counts > 0, (counts - 1) * caches[0].shape[2] + last_lens, 0).int()
    window = None if left < 0 else left + 1
    return paged_prefill_reference(q, *caches, table, lens, starts, softmax_scale=scale, window=window)


class Decode:
    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto", jit_args: list[Any] | None = None,
    ) -> None:  # fmt: skip
        assert kv_layout == "HND" and float_workspace_buffer.dtype == torch.uint8
        self.static = use_cuda_graph
        self.tensor_cores = use_tensor_cores
        self.lists: Any = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self.planned: dict[str, Any] = {}

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
        o_data_type: Any = None, data_type: Any = None, sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        self.planned = {"window": window_left, "scale": sm_scale, "sizes": (num_qo_heads, num_kv_heads, head_dim)}
        assert q_data_type == kv_data_type == torch.bfloat16 and page_size == 16
        given = (indptr, indices, last_page_len)
        assert all(t.dtype == torch.int32 for t in given)
        if not self.static:
            self.lists = given
            return
        assert len(last_page_len) == len(self.lists[2])  # the wrapper of a graph has a fixed batch size
        for buffer, values in zip(self.lists, given, strict=True):
            buffer[: len(values)].copy_(values)

    def run(self, q: Tensor, paged_kv_cache: Caches, out: Tensor | None = None) -> Tensor:
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        return attend(q, paged_kv_cache, self.lists, starts, self.planned["scale"], self.planned["window"])


class Prefill:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False) -> None:
        assert kv_layout == "HND" and not use_cuda_graph

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None, causal: bool = False,
        pos_encoding_mode: str = "NONE", use_fp16_qk_reduction: bool = False, sm_scale: float | None = None,
        window_left: int = -1, logits_soft_cap: float | None = None, rope_scale: float | None = None,
        rope_theta: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert causal and sm_scale is not None and q_data_type == kv_data_type == torch.bfloat16
        lists = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.run = lambda q, caches: attend(q, caches, lists, qo_indptr, sm_scale, window_left)


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("flashinfer")
    module.__version__ = "0.6.9"  # type: ignore[attr-defined]
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module


@pytest.mark.parametrize("window", [None, 20])
def test_prefill_and_decode_are_what_the_reference_says(
    window: int | None, spec: AttentionSpec, problem: Callable[..., Any]
) -> None:
    spec = replace(spec, window=window)
    provider = FlashInferAttention(spec)
    prefill, decode = problem([5, 1, 17, 33], [5, 30, 40, 33]), problem([1, 1, 1, 1], [1, 47, 0, 16])
    provider.prepare(prefill.batch)
    for _ in range(2):
        got = provider.prefill(prefill.q, prefill.keys, prefill.values, prefill.batch)
        assert torch.equal(got, prefill.expected(spec))
    provider.prepare(decode.batch)
    assert torch.equal(provider.decode(decode.q, decode.keys, decode.values, decode.batch), decode.expected(spec))
    assert provider._eager_decode.tensor_cores and provider.version == "0.6.9"


def test_a_graph_reads_buffers_that_later_plans_fill(spec: AttentionSpec, problem: Callable[..., Any]) -> None:
    """A graph captures `run` of the wrapper for its batch size. A replay uses the last plan that `prepare` has made for
    that wrapper.
    """
    provider = FlashInferAttention(spec)
    first, second = problem([1, 1], [30, 7], True), problem([1, 1], [3, 31], True)
    other = problem([1, 1, 1], [3, 4, 5], True)
    provider.prepare(first.batch)
    captured = provider._decode
    assert torch.equal(captured.run(first.q, (first.keys, first.values)), first.expected(spec))
    provider.prepare(other.batch)
    assert provider._decode is not captured
    provider.prepare(second.batch)
    assert torch.equal(captured.run(second.q, (second.keys, second.values)), second.expected(spec))


def test_ragged_lists_leave_padding_out() -> None:
    lens, table = np.array([17, 0, 16, 1], np.int32), np.array([[4, 5], [9, 9], [7, 9], [2, 9]], np.int32)
    starts, blocks, last_lens = ragged(HostBatch(np.arange(5, dtype=np.int32), lens, table), 16)
    assert starts.tolist() == [0, 2, 2, 3, 4] and blocks.tolist() == [4, 5, 7, 2]
    assert last_lens.tolist() == [1, 0, 16, 1]


def test_it_cannot_be_deterministic(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="distributes keys according to the batch"):
        FlashInferAttention(replace(spec, deterministic=True))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(Unavailable, match="needs the module flashinfer"):
        FlashInferAttention(spec)
