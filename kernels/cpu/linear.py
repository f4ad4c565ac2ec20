"""Packs bf16 and fp32 weights for the SIMD linear layer of the current C++ build, and calls the layer. A row's bits
depend neither on the other rows nor on the number of threads; linear_simd.cpp explains why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.loader import current

_PANEL = 16


def entry() -> Callable[..., int] | None:
    """Returns the C function `ll_linear` of the current build, or None if the build has none (such as the torch
    reference). Packed weights stay valid if a different build is chosen later, because all builds use the same packed
    form.
    """
    function = getattr(current().handle, "ll_linear", None)
    if function is None:
        return None
    function.argtypes, function.restype = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 7, ctypes.c_int
    return function  # type: ignore[no-any-return]


def pack(weight: Tensor) -> Tensor:
    """Packs [out, in] as bf16 [out / 16, in / 2, 16, 2] or fp32 [out / 16, in / 2, 2, 16].

    Zeros pad `out` to a multiple of 16 and `in` to an even number.
    """
    n_out, n_in = weight.shape
    panels, pairs = -(-n_out // _PANEL), -(-n_in // 2)
    whole = weight.new_zeros((panels * _PANEL, 2 * pairs))
    whole[:n_out, :n_in] = weight
    if weight.dtype == torch.float32:
        return whole.view(panels, _PANEL, pairs, 2).permute(0, 2, 3, 1).contiguous()
    words = whole.view(torch.int32).view(panels, _PANEL, pairs).transpose(1, 2).contiguous()
    return words.view(torch.bfloat16).view(panels, pairs, _PANEL, 2)


def linear(entry: Callable[..., int], x: Tensor, packed: Tensor, bias: Tensor | None, n_out: int) -> Tensor:
    """Maps x [rows, in], whose last dimension is contiguous, to [rows, out]. `bias` is [out] or None. All tensors have
    the same dtype.
    """
    if x.dtype != packed.dtype:
        raise ValueError(f"x is {x.dtype}, but the weight is {packed.dtype}")
    out = x.new_empty((x.shape[0], n_out))
    bias_at = None if bias is None else bias.data_ptr()
    is_bf16 = int(x.dtype == torch.bfloat16)
    sizes = (x.shape[0], x.shape[1], n_out, x.stride(0), n_out, is_bf16, torch.get_num_threads())
    entry(x.data_ptr(), packed.data_ptr(), bias_at, out.data_ptr(), *sizes)
    return out
