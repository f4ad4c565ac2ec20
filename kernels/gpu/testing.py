"""What tests of the Triton kernels need: what the interpreter makes of a rounding, and tensors on either device."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (fp32 or float64) in `dtype` as a kernel on x's device stores an fp32: to nearest even, but towards zero for
    bf16 on the CPU, where triton's interpreter (3.7.1) cuts the low bits off.

    Nothing here mends its fp8, which is right only for numbers that fp8 has.
    """
    if dtype == torch.bfloat16 and not x.is_cuda:
        return (x.float().view(torch.int32) & -0x10000).view(torch.float32).to(dtype)
    return x.float().to(dtype)


def tolerance_of(dtype: torch.dtype) -> float:
    """Relative error of a few roundings to `dtype`."""
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
