"""A linear layer on a CPU whose inputs are divided into parts. It computes y = x @ W^T + bias as a tree of the parts'
fp32 sums. Other processes, the *ranks* of a worker, may compute some of the parts, and exchange their sums. The order
of additions depends only on the number of parts, so bits do not depend on the number of ranks
(kernels/cpu/row_parallel.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu import amx, huge_pages, linear
from kernels.cpu.loader import current
from kernels.cpu.ops import raise_for
from kernels.cpu.ranks import Ranks
from kernels.linear import Provider


def entry() -> Callable[..., int] | None:
    """Returns the C function `ll_row_parallel` of the current build, or None if the build has none."""
    function = getattr(current().handle, "ll_row_parallel", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 7
    return function


def our_provider(dtype: torch.dtype, n_in: int = amx.DEPTH) -> Provider:
    """Returns "amx" if AMX tiles are available and fit `n_in` inputs, else "simd". With these providers, an output does
    not depend on the other outputs, so a matrix may be divided by its outputs.
    """
    fits_tiles = dtype == torch.bfloat16 and amx.available() and n_in % amx.DEPTH == 0
    return "amx" if fits_tiles else "simd"


class RowParallelLinear:
    """A prepacked linear layer whose inputs are divided into parts.

    `weight` is [out, in], in bf16 or fp32, and has only this rank's inputs. `bias` is [out], the same on every rank, or
    None. `num_parts` is the number of equal parts into which this rank's inputs are divided. The number of parts and
    the number of ranks are powers of two up to 8. `ranks` is None if there is a single rank.
    """

    __slots__ = ("addresses", "bias", "how", "in_features", "num_parts", "out_features", "packed", "ranks", "site")

    def __init__(self, weight: Tensor, bias: Tensor | None, num_parts: int, ranks: Ranks | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach().contiguous()
        self.num_parts, self.ranks = num_parts, ranks
        self.how = "simd"
        self.site: int | None = None
        parts = weight.detach().split(self.in_features // num_parts, dim=1)
        self.packed = [linear.pack(part.contiguous()) for part in parts]
        for part in self.packed:
            huge_pages.move(part)
        self.addresses = (ctypes.c_void_p * num_parts)(*(part.data_ptr() for part in self.packed))

    @property
    def num_sums(self) -> int:
        """The number of fp32 sums [rows, out] for which a call needs memory."""
        return self.num_parts + (0 if self.ranks is None else self.ranks.size)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x [rows, in], in the weight's dtype, to [rows, out], the sum over all ranks. Every rank must make the
        call. Raises ValueError if a rank is lost.
        """
        run = entry()
        assert run is not None
        rows, x = len(x), x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty((rows, self.out_features))
        if not rows:
            return out
        sums = torch.empty((self.num_sums, rows, self.out_features))
        bias_at = None if self.bias is None else self.bias.data_ptr()
        ranks_at = None if self.ranks is None else ctypes.addressof(self.ranks)
        sizes = (self.num_parts, rows, self.in_features, self.out_features, x.stride(0))
        how = (int(x.dtype == torch.bfloat16), torch.get_num_threads())
        at = (x.data_ptr(), ctypes.addressof(self.addresses), bias_at, out.data_ptr(), sums.data_ptr(), ranks_at)
        raise_for(run(*at, *sizes, *how))
        return out
