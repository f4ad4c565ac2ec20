"""The elementwise half of GeGLU: gelu(gate) * up, gelu in its tanh form. Rounds after gelu and after the product, as
Hugging Face's Gemma does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.loader import current, on_triton
from kernels.cpu.selection import count_fallback


def gelu_mul_reference(x: Tensor) -> Tensor:
    """Reference for `gelu_mul`, in plain torch."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def gelu_mul(x: Tensor) -> Tensor:
    """Maps x [..., 2 * intermediate], gate then up, to [..., intermediate]. Raises ValueError for an odd width."""
    if x.shape[-1] % 2:
        raise ValueError("the last dimension must hold gate and up, of equal size")
    if on_triton(x):
        from kernels.gpu import silu_mul as gpu

        return gpu.gelu_mul(x)
    library = current()
    if library.handle is None or x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float32):
        if library.isa != "reference":
            count_fallback("gelu_mul", f"no fast path for {x.dtype} on {x.device.type}")
        return gelu_mul_reference(x)
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    torch.ops.looseleaf.gelu_mul(out, x.reshape(-1, x.shape[-1]))
    return out
