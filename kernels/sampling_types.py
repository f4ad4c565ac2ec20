"""Types that the CPU and GPU samplers share, for columns of numbers and for log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Numbers = Sequence[float] | Sequence[int] | Tensor


def column_of(values: Numbers, dtype: torch.dtype, length: int) -> Tensor:
    if dtype == torch.int64 and not isinstance(values, Tensor):  # seeds are unsigned 64-bit numbers; keep the bits
        values = [v - (1 << 64) if v >= 1 << 63 else v for v in map(int, values)]
    column = torch.as_tensor(values, dtype=dtype).contiguous()
    if column.shape != (length,):
        raise ValueError(f"expected [{length}], got {tuple(column.shape)}")
    return column


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The log-probabilities of a batch of rows. `rank` starts at 1; equal logits have the same rank."""

    chosen: Tensor  # fp32 [B]
    rank: Tensor  # int64 [B]
    top_ids: Tensor  # int64 [B, k], most likely first, ties by id
    top: Tensor  # fp32 [B, k]
