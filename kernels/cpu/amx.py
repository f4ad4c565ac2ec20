"""Opens the build for Intel's AMX tiles, lets attention use it, packs bf16 weights for its linear layer, and calls the
layer. Unlike in oneDNN's AMX product, the order in which a row is summed does not depend on the other rows.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.loader import amx_library, current
from kernels.cpu.selection import CpuLibrary

DEPTH = 32
"""The number of inputs must be a multiple of DEPTH."""
_PANEL, _TILE = 32, 16


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Opens the build for AMX tiles. Returns None if this CPU does not support them, or the installation does not
    contain the build.
    """
    if (path := amx_library()) is None:
        return None
    library = ctypes.CDLL(str(path))
    library.ll_amx_init.argtypes = [ctypes.c_void_p]
    library.ll_amx_linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 6
    return library


def _entry() -> Callable[..., int] | None:
    """Returns the C function `ll_amx_linear`, or None if the CPU, system or installation does not support it."""
    library = _library()
    return library.ll_amx_linear if library is not None and _is_allowed(library, current()) else None


@functools.lru_cache(maxsize=1)  # repeated when a different build is chosen
def _is_allowed(library: ctypes.CDLL, beside: CpuLibrary) -> bool:
    """Requests permission to use the tiles from the system, and returns whether it was granted. `beside` is the build
    whose thread team the product uses, if it has one.
    """
    team = getattr(beside.handle, "ll_team", None)
    if team is not None:
        team.argtypes, team.restype = [], ctypes.c_void_p
    return library.ll_amx_init(team() if team is not None else None) == 0  # type: ignore[no-any-return]


def attend_on_tiles(build: CpuLibrary) -> bool:
    """Lets the attention of a build use the tiles. Returns whether it does: only the build for AVX-512 can. Raises
    OSError or AttributeError if the build for AMX tiles cannot be loaded or does not fit to the other build.
    """
    library = _library()
    if library is None or build.handle is None or build.isa != "avx512" or not _is_allowed(library, build):
        return False
    if (theirs := library.ll_amx_tile_bytes()) != (ours := build.handle.ll_attention_tile_bytes()):
        raise OSError(f"the builds for AMX tiles and AVX-512 differ ({theirs} and {ours} bytes): build both again")
    build.handle.ll_attention_tiles.argtypes = [ctypes.c_void_p]
    build.handle.ll_attention_tiles(ctypes.cast(library.ll_amx_attend, ctypes.c_void_p))
    return True


def available() -> bool:
    return _entry() is not None


def address() -> int | None:
    """Returns the address of the C function, for callers in C, or None if the function is not available."""
    found = _entry()
    return None if found is None else ctypes.cast(found, ctypes.c_void_p).value  # type: ignore[arg-type]


def pack(weight: Tensor) -> Tensor:
    """Packs bf16 [out, in] as [out / 32, in / 32, 2, 16, 16, 2]. `in` must be a multiple of 32; `out` is padded with
    zeros.
    """
    n_out, n_in = weight.shape
    panels = -(-n_out // _PANEL)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, panels * _PANEL - n_out))
    pairs = padded.view(panels, 2, _TILE, n_in // DEPTH, _TILE, 2)  # panel, tile, output, step, pair, element
    return pairs.permute(0, 3, 1, 4, 2, 5).contiguous()


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, n_out: int) -> Tensor:
    """Maps bf16 x [rows, in], whose last dimension is contiguous, to [rows, out]. `bias` is bf16 [out] or None."""
    entry = _entry()
    assert entry is not None
    out = x.new_empty((x.shape[0], n_out))
    bias_at = None if bias is None else bias.data_ptr()
    sizes = (x.shape[0], x.shape[1], n_out, x.stride(0), n_out, torch.get_num_threads())
    entry(x.data_ptr(), packed.data_ptr(), bias_at, out.data_ptr(), *sizes)
    return out
