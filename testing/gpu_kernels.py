"""What tests of the Triton kernels need: what the interpreter makes of a rounding and of a product, tolerances."""

from __future__ import annotations

from typing import Any

import numpy as np
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


def keep_rows() -> None:
    """From now on a row of the interpreter's `tl.dot` has the same bits wherever in the tile it stands, as on tensor
    cores. It calls numpy's `matmul`, for which that holds only by the grace of the BLAS (with AVX-512, not with AVX2).
    """
    from triton.runtime import interpreter

    if interpreter.np is np:
        interpreter.np = _NumpyThatKeepsRows()


class _NumpyThatKeepsRows:
    """numpy, but for `matmul`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return np.einsum("...mk,...kn->...mn", a.astype(dtype), b.astype(dtype), optimize=False)


def tolerance_of(dtype: torch.dtype) -> float:
    """Relative error of a few roundings to `dtype`."""
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
