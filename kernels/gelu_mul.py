"""Computes the elementwise half of GeGLU, gelu(gate) * up, with gelu in its tanh form. Values are rounded after gelu
and after the product, as in Hugging Face's Gemma.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gated_mul import gated_mul


def gelu_mul_reference(x: Tensor) -> Tensor:
    """Computes `gelu_mul` in plain torch, as the reference."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def gelu_mul(x: Tensor) -> Tensor:
    """Maps x [..., 2 * intermediate], gate then up, to [..., intermediate]. Raises ValueError for an odd width."""
    return gated_mul("gelu_mul", x, gelu_mul_reference)
