"""Computes the softcap that Gemma 2 applies to logits, cap * tanh(x / cap), in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.loader import current


def softcap_reference(x: Tensor, cap: float) -> Tensor:
    """Computes `softcap_` in plain torch, as the reference, and returns a new tensor."""
    return cap * torch.tanh(x / cap)


def softcap_(x: Tensor, cap: float) -> Tensor:
    """Applies the softcap to x, contiguous fp32 of any shape, in place, and returns x. Raises ValueError for any other
    tensor.
    """
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError("x must be contiguous fp32")
    if current().handle is None or x.device.type != "cpu":  # on a GPU, torch computes every element the same way
        return x.copy_(softcap_reference(x, cap))
    torch.ops.looseleaf.softcap(x, cap)
    return x
