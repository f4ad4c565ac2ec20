"""Fixtures: a small paged batch with queries, and an attention spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention_reference import paged_prefill_reference
from kernels.providers.base import AttentionBatch, AttentionSpec, HostBatch

HOPPER = AttentionSpec(
    device=torch.device("cpu"),
    compute_capability=(9, 0),
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    block_size=16,
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    softmax_scale=0.2,
    window=None,
    max_model_len=640,
    deterministic=False,
)


@dataclass
class Problem:
    """Queries, a paged cache, and the answer of the reference."""

    q: Tensor
    keys: Tensor
    values: Tensor
    batch: AttentionBatch

    def expected(self, spec: AttentionSpec) -> Tensor:
        b = self.batch
        where = (self.q, self.keys, self.values, b.block_table, b.context_lens, b.cu_seqlens_q)
        return paged_prefill_reference(*where, softmax_scale=spec.softmax_scale, window=spec.window)


@pytest.fixture
def spec() -> AttentionSpec:
    """A spec for Hopper, but with tensors in host memory for the tests' stand-ins."""
    return HOPPER


@pytest.fixture
def problem(spec: AttentionSpec) -> Callable[..., Problem]:
    """Returns problem(q_lens, context_lens, is_static=False, block_size=16), a batch of chunks over blocks in random
    order."""

    def make(q_lens: list[int], context_lens: list[int], is_static: bool = False, block_size: int = 16) -> Problem:
        s = replace(spec, block_size=block_size)
        generator = torch.Generator().manual_seed(len(q_lens))
        lens = np.array(context_lens, np.int32)
        starts = np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)
        width = max(1, int(-(-lens.max() // block_size)))
        num_blocks = len(lens) * width + 1
        table = torch.randperm(num_blocks - 1, generator=generator).int().view(len(lens), width).numpy()
        arena = torch.randn((num_blocks, 3, 2, s.num_kv_heads, block_size, s.head_dim), generator=generator)
        arena = arena.to(s.dtype)
        q = torch.randn((int(starts[-1]), s.num_heads, s.head_dim), generator=generator).to(s.dtype)
        tensors = [torch.from_numpy(a) for a in (starts, lens, table)]
        decode_only = all(n == 1 for n in q_lens)
        batch = AttentionBatch(*tensors, HostBatch(starts, lens, table), decode_only, is_static)
        return Problem(q, arena[:, 1, 0], arena[:, 1, 1], batch)

    return make
