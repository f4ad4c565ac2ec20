"""Provides rounding, matrix products and tolerances for tests of the Triton kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns x (fp32 or float64) in `dtype`, rounded as in a kernel on x's device. Values are rounded to nearest even,
    except bf16 on the CPU, which is rounded towards zero, because triton's interpreter (3.7.1) truncates the low bits.
    """
    if dtype == torch.bfloat16 and not x.is_cuda:
        return (x.float().view(torch.int32) & -0x10000).view(torch.float32).to(dtype)
    return x.float().to(dtype)


def keep_rows() -> None:
    """Makes the interpreter's `tl.dot` row-invariant, so that a row's bits do not depend on the row's position in the
    tile. The interpreter calls numpy's `matmul`, whose row invariance depends on the BLAS.
    """
    from triton.runtime import interpreter

    if interpreter.np is np:
        interpreter.np = _NumpyThatKeepsRows()


class _NumpyThatKeepsRows:
    """A stand-in for numpy with a different `matmul`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return np.einsum("...mk,...kn->...mn", a.astype(dtype), b.astype(dtype), optimize=False)


def tolerance_of(dtype: torch.dtype) -> float:
    """Returns a bound for the relative error of a few roundings to `dtype`."""
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
