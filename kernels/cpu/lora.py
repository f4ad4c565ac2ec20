"""The C structures of lora.h, with fields in the same order, and the call of `ll_lora`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kernels.cpu.selection import CpuLibrary

I64, I32, F64, PTR = ctypes.c_int64, ctypes.c_int32, ctypes.c_double, ctypes.c_void_p
MOST_PARTS, MOST_RANK, TILE_ROWS = 3, 512, 4
"""The limits in lora.h."""


class PartOf(Protocol):
    """The interface of `kernels.lora.LoraPart`."""

    a: Tensor
    b: Tensor
    at: int
    scale: float


class Part(ctypes.Structure):
    """The correction of one projection of a packed product."""

    _fields_ = [
        *((name, PTR) for name in ("a", "b")), *((name, I64) for name in ("rank", "at", "n_out")), ("scale", F64)
    ]  # fmt: skip


class Product(ctypes.Structure):
    """The corrections of one packed product."""

    _fields_ = [("parts", Part * MOST_PARTS), ("num_parts", I64)]


class Step(ctypes.Structure):
    """The C structure `LoraStep`, which contains the adapters of a step, and the rows that use each of them."""

    _fields_ = [("adapters", PTR), ("tiles", PTR), ("num_tiles", I64)]


def table_of(products: Sequence[Sequence[PartOf]]) -> ctypes.Array[Product]:
    """Returns one `Product` per site. The caller must keep the tensors alive while the table is used."""
    table = (Product * len(products))()
    for product, parts in zip(table, products, strict=True):
        product.num_parts = len(parts)
        for place, part in zip(product.parts, parts, strict=False):
            rank, n_out = part.b.shape
            place.a, place.b = part.a.data_ptr(), part.b.data_ptr()
            place.rank, place.at, place.n_out, place.scale = rank, part.at, n_out, part.scale
    return table


def tiles_of(adapter_of_row: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Returns tiles int32 [tiles, 2 + TILE_ROWS]. A tile contains the index of an adapter, the number of its rows in
    the tile, and these rows, padded with -1. Rows whose adapter is -1 are in no tile.
    """
    tiles = []
    for adapter in np.unique(adapter_of_row[adapter_of_row >= 0]):
        rows = np.flatnonzero(adapter_of_row == adapter)
        tile = np.full((-(-len(rows) // TILE_ROWS), 2 + TILE_ROWS), -1, np.int32)
        tile[:, 0], tile[:, 1] = adapter, TILE_ROWS
        tile[-1, 1] = (len(rows) - 1) % TILE_ROWS + 1
        padded = np.full(len(tile) * TILE_ROWS, -1, np.int32)
        padded[: len(rows)] = rows
        tile[:, 2:] = padded.reshape(-1, TILE_ROWS)
        tiles.append(tile)
    return np.concatenate(tiles) if tiles else np.empty((0, 2 + TILE_ROWS), np.int32)


@functools.cache
def entry(library: CpuLibrary) -> Callable[..., int] | None:
    """Returns the C function `ll_lora` of a build, or None if the build has none."""
    if library.handle is None or not hasattr(library.handle, "ll_lora"):
        return None
    function = library.handle["ll_lora"]
    function.argtypes, function.restype = [PTR] * 3 + [I64] * 6, ctypes.c_int
    return function
