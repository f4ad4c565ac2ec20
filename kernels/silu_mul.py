"""Computes the elementwise half of SwiGLU, silu(gate) * up. Values are rounded after silu and after the product, as in
Hugging Face's Llama.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gated_mul import gated_mul


def silu_mul_reference(x: Tensor) -> Tensor:
    """Computes `silu_mul` in plain torch, as the reference."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def silu_mul(x: Tensor) -> Tensor:
    """Maps x [..., 2 * intermediate], gate then up, to [..., intermediate]. Raises ValueError for an odd width."""
    return gated_mul("silu_mul", x, silu_mul_reference)
