"""Samples tokens from logits on a device, with `kernels.gpu.sampling_kernels`. The contracts are those of
`kernels.sampling`.

Random numbers, filters and the draw are the same as on the CPU. The token is also the same, unless float64 sums in a
different order fall on different sides of a limit. Nothing is read back, so a CUDA graph can capture a call if the
columns are tensors on the device. A filter reads a row once per bisection step, an estimated 15 to 30 times. On an
H100, top-k and top-p of 64 rows of 128,256 tokens take 0.66 ms.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from kernels.gpu.launch import power_of_2
from kernels.gpu.sampling_kernels import best_kernel, draw_kernel, filter_kernel, log_softmax_top_kernel, weigh_kernel
from kernels.sampling_types import Numbers, TopLogprobs, column_of

_TILE = 4096  # tokens; sums are computed as a tree within a tile, and over tiles in ascending order
OPTIONS: dict[str, Any] = {"num_warps": 16, "enable_fp_fusion": False}


def tile_for(vocab: int) -> int:
    """Returns the tile size, which determines the order of a row's sums and depends only on the vocabulary."""
    return min(_TILE, power_of_2(vocab))


def _packed_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def sample(
    logits: Tensor,
    temperature: Numbers,
    top_k: Numbers,
    top_p: Numbers,
    min_p: Numbers,
    seeds: Numbers,
    sample_indices: Numbers,
    positions: Numbers,
) -> Tensor:
    """Implements the contract of `kernels.sampling.sample`. Columns on other devices are copied to the
    logits' device.
    """
    batch, vocab = logits.shape
    logits, device = _packed_rows(logits), logits.device
    floats = [column_of(c, torch.float32, batch).to(device) for c in (temperature, top_p, min_p)]
    ints = [column_of(c, torch.int64, batch).to(device) for c in (top_k, seeds, sample_indices, positions)]
    heat, (k, seed, index, position) = floats[0], ints
    tile = tile_for(vocab)
    tiles = triton.cdiv(vocab, tile)
    out = torch.empty(batch, dtype=torch.int64, device=device)
    best = torch.empty((batch, tiles), dtype=torch.int64, device=device)
    count = torch.empty((batch, tiles), dtype=torch.int32, device=device)
    mass = torch.empty((batch, tiles), dtype=torch.float64, device=device)
    x, weight = (torch.empty((batch, vocab), dtype=torch.float32, device=device) for _ in range(2))
    shape = {"TILE": tile, "TILES": power_of_2(tiles), **OPTIONS}
    if batch:
        row = logits.stride(0)
        best_kernel[(batch, tiles)](best, logits, vocab, row, TILE=tile, **OPTIONS)
        weigh_kernel[(batch, tiles)](x, weight, mass, count, best, logits, heat, floats[2], vocab, row, **shape)
        filter_kernel[(batch,)](x, weight, mass, count, best, heat, k, floats[1], vocab, tiles, **shape)
        draw_kernel[(batch,)](out, weight, mass, best, heat, seed, index, position, vocab, tiles, **shape)
    return out


def log_softmax_top(logits: Tensor, token_ids: Tensor, k: int) -> TopLogprobs:
    """Implements the contract of `kernels.sampling.log_softmax_top`, except that token ids are not checked. The
    log-probability of an id that is out of range is NaN.
    """
    batch, vocab = logits.shape
    logits, device = _packed_rows(logits), logits.device
    result = TopLogprobs(
        torch.empty(batch, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
        torch.empty((batch, k), dtype=torch.int64, device=device),
        torch.empty((batch, k), device=device),
    )
    if batch:
        log_softmax_top_kernel[(batch,)](
            result.chosen, result.rank, result.top_ids, result.top, logits, token_ids.contiguous(),
            vocab, logits.stride(0), k, TILE=tile_for(vocab), **OPTIONS,
        )  # fmt: skip
    return result
