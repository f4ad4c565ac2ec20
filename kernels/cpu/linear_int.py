"""Packs weights of 4 or 8 bits for the linear layer of the current C++ build, and calls the layer. A row's bits depend
neither on the other rows nor on the number of threads; linear_int.cpp explains why. int_panels.h describes the packed
form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.cpu import huge_pages
from kernels.cpu.loader import current
from kernels.cpu.selection import count_fallback
from kernels.quantization import QuantizedWeight, merged

_PANEL, _LINE, _UNIT = 16, 64, 8


def entry() -> Callable[..., int] | None:
    """Returns the C function `ll_linear_int` of the current build, or None if the build has none (such as the torch
    reference).
    """
    function = getattr(current().handle, "ll_linear_int", None)
    if function is None:
        return None
    function.argtypes, function.restype = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 6, ctypes.c_int
    return function  # type: ignore[no-any-return]


def address() -> int | None:
    """Returns the address of the C function, for callers in C, or None if the function is not available."""
    found = entry()
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value  # type: ignore[arg-type]


def pack(weights: Sequence[QuantizedWeight], dtype: torch.dtype) -> Tensor:
    """Packs weights, stacked vertically, for inputs of `dtype` (bf16 or fp32). Returns uint8 in the form that
    int_panels.h describes.
    """
    sections = [_section(weight, dtype) for weight in weights]
    for section in sections[:-1]:
        section[:_LINE].view(torch.int64)[6] = len(section)
    return torch.cat(sections)


def _section(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    n_out, _ = weight.shape
    panels, groups = -(-n_out // _PANEL), weight.scales.shape[1]
    rows = panels * _PANEL - n_out
    wide = weight.scales.dtype == torch.float32
    header = torch.zeros(_LINE // 8, dtype=torch.int64)
    is_bf16 = int(dtype == torch.bfloat16)
    header[:6] = torch.tensor([weight.bits, weight.group, int(weight.offsets is not None), int(wide), is_bf16, n_out])

    def factors(of: Tensor) -> Tensor:
        """Returns the scales or offsets [panels, groups * 16] as bytes, with each panel padded to whole cache lines."""
        laid = torch.nn.functional.pad(of, (0, 0, 0, rows)).view(panels, _PANEL, groups).transpose(1, 2)
        as_bytes = laid.contiguous().view(panels, -1).view(torch.uint8)
        return torch.nn.functional.pad(as_bytes, (0, -as_bytes.shape[1] % _LINE))

    values = torch.nn.functional.pad(weight.values, (0, groups * weight.group - weight.shape[1], 0, rows))
    parts = [factors(weight.scales), *([factors(weight.offsets)] if weight.offsets is not None else [])]
    parts.append(_bytes(values, panels) if weight.bits == 8 else _words(values, panels))
    return torch.cat([header.view(torch.uint8), torch.cat(parts, dim=1).view(-1)])


def _bytes(values: Tensor, panels: int) -> Tensor:
    """Returns words of four values each, with the first value in the lowest bits."""
    laid = values.view(panels, _PANEL, -1, 4).transpose(1, 2)  # panel, unit, output, input
    return laid.contiguous().view(panels, -1).view(torch.uint8)


def _words(values: Tensor, panels: int) -> Tensor:
    """Returns words of eight values each, with even inputs in the low half, lowest bits first, and odd inputs in the
    high half.
    """
    eight = (values.view(panels, _PANEL, -1, _UNIT) & 15).to(torch.int32)  # panel, output, unit, input
    words = torch.zeros(eight.shape[:-1], dtype=torch.int32)
    for i in range(_UNIT):
        words |= eight[..., i] << (4 * (i // 2) + 16 * (i % 2))
    return words.transpose(1, 2).contiguous().view(panels, -1).view(torch.uint8)


def linear(entry: Callable[..., int], x: Tensor, packed: Tensor, bias: Tensor | None, n_out: int) -> Tensor:
    """Maps x [rows, in], whose last dimension is contiguous, to [rows, out]. `bias` is [out] or None. Both have the
    dtype for which the weight was packed.
    """
    out = x.new_empty((x.shape[0], n_out))
    bias_at = None if bias is None else bias.data_ptr()
    sizes = (x.shape[0], x.shape[1], n_out, x.stride(0), n_out, torch.get_num_threads())
    entry(x.data_ptr(), packed.data_ptr(), bias_at, out.data_ptr(), *sizes)
    return out


def packed_product(
    weights: Sequence[QuantizedWeight], bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """Packs weights, stacked vertically. Returns the packed weights, and a function from x [rows, in] to [rows, out].
    If there is no kernel for the weights, counts a fallback and returns None.
    """
    function, n_out = entry(), sum(weight.shape[0] for weight in weights)
    if weights[0].values.is_cuda or function is None or dtype not in (torch.bfloat16, torch.float32):
        count_fallback("quantized linear", f"no kernel for weights of few bits and {dtype} here", "dequantized")
        return None
    packed = pack(merged(weights), dtype)
    huge_pages.move(packed)

    def product(x: Tensor) -> Tensor:
        if x.dtype != dtype:
            raise ValueError(f"x is {x.dtype}, but the weight was packed for {dtype}")
        return linear(function, x if x.stride(1) == 1 else x.contiguous(), packed, bias, n_out)

    return packed, product
