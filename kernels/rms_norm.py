"""RMS norm, optionally after adding a residual. Values are rounded as in Hugging Face's Llama (normalize in fp32,
round, multiply) or, with an fp32 weight, as in Hugging Face's Gemma (normalize and multiply in fp32, round).
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from kernels.cpu.loader import current, on_triton
from kernels.cpu.selection import count_fallback


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `rms_norm` in plain torch, as the reference."""
    summed = x if residual is None else x + residual
    wide = summed.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out = (normed.to(weight.dtype) * weight).to(x.dtype)
    return out if residual is None else (out, summed)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: None = None) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]: ...


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Computes the root mean square layer norm (Zhang and Sennrich 2019) over the last dimension.

    x, residual: [..., hidden] in one dtype; weight: [hidden] in the same dtype, or in fp32.
    Returns the norm of x or, with a residual, (norm of x + residual, x + residual). The sum is rounded to the dtype.
    Except on the reference path, a row is summed in an order that depends only on its length. Raises ValueError if
    shapes or dtypes do not fit.
    """
    if weight.shape != x.shape[-1:] or weight.dtype not in (x.dtype, torch.float32):
        raise ValueError("weight must be [hidden] in the dtype of x or in fp32")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError("residual must be like x")
    if on_triton(x):
        from kernels.gpu import rms_norm as gpu

        return gpu.rms_norm(x, weight, eps, residual)
    library = current()
    if library.handle is None or x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float32):
        if library.isa != "reference":
            count_fallback("rms_norm", f"no fast path for {x.dtype} on {x.device.type}")
        return rms_norm_reference(x, weight, eps, residual)
    rows = x.reshape(-1, x.shape[-1])  # a view unless the outer dimensions cannot be merged
    out = torch.empty(x.shape, dtype=x.dtype)
    if residual is None:
        torch.ops.looseleaf.rms_norm(out, rows, weight, eps, None, None)
        return out
    summed = torch.empty(x.shape, dtype=x.dtype)
    torch.ops.looseleaf.rms_norm(out, rows, weight, eps, residual.reshape(-1, x.shape[-1]), summed)
    return out, summed
