"""The bf16 linear on Intel's AMX tiles: finding its build, asking the system for the tiles, packing, calling.

Its one purpose beside speed: oneDNN's AMX product adds up a row in an order that depends on the other rows, ours does
not. Knows nothing of the model.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.loader import amx_library, current

DEPTH = 32
"""The number of inputs must be a multiple of this."""
_PANEL, _TILE = 32, 16


@functools.cache
def _entry() -> Callable[..., int] | None:
    """The C function, or None where this CPU, system or installation has none."""
    path = amx_library()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.ll_amx_init.argtypes = [ctypes.c_void_p]
    if library.ll_amx_init(_team()) != 0:
        return None
    function = library.ll_amx_linear
    function.argtypes, function.restype = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 6, ctypes.c_int
    return function


def _team() -> int | None:
    """The threads of the build in use, which the product shares; None: there is none."""
    function = getattr(current().handle, "ll_team", None)
    if function is None:
        return None
    function.argtypes, function.restype = [], ctypes.c_void_p
    return function()  # type: ignore[no-any-return]


def available() -> bool:
    return _entry() is not None


def address() -> int | None:
    """Of the C function, for callers in C."""
    found = _entry()
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value  # type: ignore[arg-type]


def pack(weight: Tensor) -> Tensor:
    """[out, in] bf16, `in` a multiple of 32 -> [out / 32, in / 32, 2, 16, 16, 2], outputs padded with zeros to 32."""
    n_out, n_in = weight.shape
    panels = -(-n_out // _PANEL)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, panels * _PANEL - n_out))
    pairs = padded.view(panels, 2, _TILE, n_in // DEPTH, _TILE, 2)  # panel, tile, output, step, pair, element
    return pairs.permute(0, 3, 1, 4, 2, 5).contiguous()


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, n_out: int) -> Tensor:
    """x bf16 [rows, in], last dimension contiguous; bias bf16 [out] or None -> [rows, out]."""
    entry = _entry()
    assert entry is not None
    out = x.new_empty((x.shape[0], n_out))
    bias_at = None if bias is None else bias.data_ptr()
    sizes = (x.shape[0], x.shape[1], n_out, x.stride(0), n_out, torch.get_num_threads())
    entry(x.data_ptr(), packed.data_ptr(), bias_at, out.data_ptr(), *sizes)
    return out
