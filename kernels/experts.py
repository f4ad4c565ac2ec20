"""Chooses the experts for each token in a mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.loader import current


def route_reference(scores: Tensor, per_token: int, *, renormalize: bool, round_weights: bool) -> tuple[Tensor, Tensor]:
    """Computes `route` in plain torch, as the reference."""
    odds = scores.float().softmax(dim=-1)
    weights, experts = odds.topk(per_token, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights
    weights = weights.to(scores.dtype).float() if round_weights else weights
    experts, order = experts.sort(dim=-1)
    return weights.gather(-1, order), experts


def route(scores: Tensor, per_token: int, *, renormalize: bool, round_weights: bool) -> tuple[Tensor, Tensor]:
    """Returns each token's `per_token` most likely experts, as their weights, fp32, and their numbers, int64. Both are
    [T, per_token], in ascending order of the numbers.

    scores: [T, experts], bf16 or fp32. Weights are the softmax over all experts in fp32. With `renormalize`, a token's
    weights are scaled to a sum of 1. With `round_weights`, they are rounded to the dtype of the scores. Of equally
    likely experts, the CPU kernel chooses those with the lowest numbers. A row's result does not depend on the other
    rows.
    """
    if current().handle is None or scores.device.type != "cpu" or scores.dtype not in (torch.bfloat16, torch.float32):
        return route_reference(scores, per_token, renormalize=renormalize, round_weights=round_weights)
    weights = torch.empty((len(scores), per_token))
    experts = torch.empty((len(scores), per_token), dtype=torch.int64)
    torch.ops.looseleaf.route(weights, experts, scores.contiguous(), renormalize, round_weights)
    return weights, experts
