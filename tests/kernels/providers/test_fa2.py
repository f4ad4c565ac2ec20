"""The calls to FA2. A stand-in in this file has the signatures of flash-attn 2.8.3, and computes with our reference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention_reference import paged_prefill_reference
from kernels.providers.base import AttentionSpec, Unavailable
from kernels.providers.fa2 import Fa2Attention

Window = tuple[int, int]


class FlashAttn(ModuleType):
    """A stand-in for the part of `flash_attn` that we use. Both functions are causal with bottom-right alignment, as
    documented.
    """

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.__version__ = "2.8.3"
        self.splits: list[int] = []

    def flash_attn_with_kvcache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
        rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
        window_size: Window = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False,
    ) -> Tensor:  # fmt: skip
        assert causal and k is None and cache_seqlens is not None and block_table is not None and softmax_scale
        self.splits.append(num_splits)
        starts = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
        rows = (q.flatten(0, 1), k_cache, v_cache, block_table, cache_seqlens, starts)
        return self._attend(*rows, softmax_scale, window_size).view(q.shape)

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert causal and block_table is not None and softmax_scale and cu_seqlens_k.dtype == torch.int32
        lens = cu_seqlens_k.diff()
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q and int(lens.max()) == max_seqlen_k
        return self._attend(q, k, v, block_table, lens, cu_seqlens_q, softmax_scale, window_size)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, starts: Tensor, scale: float, window: Window
    ) -> Tensor:
        assert k.shape[1] % 256 == 0  # [blocks, slots, heads, dim]
        left, right = window
        assert (left < 0) == (right < 0) and right <= 0
        where = (q, k.transpose(1, 2), v.transpose(1, 2), table, lens.int(), starts)
        return paged_prefill_reference(*where, softmax_scale=scale, window=None if left < 0 else left + 1)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> FlashAttn:
    module = FlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


@pytest.mark.parametrize(("window", "deterministic"), [(None, False), (300, True)])
def test_prefill_and_decode_are_what_the_reference_says(
    window: int | None, deterministic: bool, flash_attn: FlashAttn, spec: AttentionSpec, problem: Callable[..., Any]
) -> None:
    spec = replace(spec, window=window, block_size=256, deterministic=deterministic)
    provider = Fa2Attention(spec)
    prefill = problem([5, 1, 17], [5, 400, 600], block_size=256)
    provider.prepare(prefill.batch)
    for _ in range(2):
        got = provider.prefill(prefill.q, prefill.keys, prefill.values, prefill.batch)
        assert torch.equal(got, prefill.expected(spec))
    decode = problem([1, 1, 1], [1, 513, 0], block_size=256)
    provider.prepare(decode.batch)
    got = provider.decode(decode.q, decode.keys, decode.values, decode.batch)
    assert torch.equal(got, decode.expected(spec)) and got.shape == decode.q.shape
    assert flash_attn.splits == [1 if deterministic else 0] and provider.version == "2.8.3"


def test_blocks_of_other_sizes_are_refused(flash_attn: FlashAttn, spec: AttentionSpec) -> None:
    with pytest.raises(Unavailable, match="fa2 takes blocks of multiples of 256 slots, not 16"):
        Fa2Attention(spec)


def test_without_the_module_the_reason_is_one_sentence(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(Unavailable, match="needs the module flash_attn"):
        Fa2Attention(replace(spec, block_size=256))
