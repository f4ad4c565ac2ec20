"""Chooses the implementation of `gelu_mul` and `silu_mul`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.loader import current, on_triton
from kernels.cpu.selection import count_fallback


def gated_mul(name: str, x: Tensor, reference: Callable[[Tensor], Tensor]) -> Tensor:
    """Runs the kernel `name` on x [..., 2 * intermediate], or `reference` if no kernel supports x. Raises ValueError if
    the width is odd.
    """
    if x.shape[-1] % 2:
        raise ValueError("the last dimension must be even: gate, then up")
    if on_triton(x):
        from kernels.gpu import silu_mul as gpu

        on_gpu: Tensor = getattr(gpu, name)(x)
        return on_gpu
    library = current()
    if library.handle is None or x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float32):
        if library.isa != "reference":
            count_fallback(name, f"no fast path for {x.dtype} on {x.device.type}")
        return reference(x)
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    getattr(torch.ops.looseleaf, name)(out, x.reshape(-1, x.shape[-1]))
    return out
