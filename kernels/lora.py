"""Applies low-rank adapters (LoRA, Hu et al. 2021), out += scale * (x A^T) B^T, to the rows of a step that have an
adapter.

A *site* is a packed linear layer of the model, such as the layer of q, k and v. An adapter corrects up to three
projections of a site. On a CPU, a row's bits depend neither on the other rows nor on their adapters, and a row without
an adapter is not changed. On a GPU, torch computes the products adapter by adapter, and bits may depend on the number
of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import lora as cpu
from kernels.cpu.loader import current
from kernels.cpu.selection import count_fallback

MOST_RANK = cpu.MOST_RANK


@dataclass(frozen=True, slots=True, eq=False)
class LoraPart:
    """The correction of one projection. a [rank, in] and b [rank, out] (B transposed) are contiguous and have the
    layer's dtype. `at` is the projection's first output within the site.
    """

    a: Tensor
    b: Tensor
    at: int
    scale: float

    def __post_init__(self) -> None:
        if not 1 <= len(self.a) == len(self.b) <= MOST_RANK:
            raise ValueError(f"a and b must have the same rank, at most {MOST_RANK}")
        if not (self.a.is_contiguous() and self.b.is_contiguous()):
            raise ValueError("a and b must be contiguous")


class LoraWeights:
    """The corrections that one adapter makes to a model, by site. A site that the adapter does not correct has no
    parts.
    """

    __slots__ = ("num_bytes", "products", "table")

    def __init__(self, products: Sequence[Sequence[LoraPart]]) -> None:
        """Creates the weights from the parts of each site. Raises ValueError if a site has more than three parts."""
        if any(len(parts) > cpu.MOST_PARTS for parts in products):
            raise ValueError(f"a site has at most {cpu.MOST_PARTS} parts")
        self.products = tuple(map(tuple, products))
        self.table = cpu.table_of(self.products)
        parts = [part for product in self.products for part in product]
        self.num_bytes = sum(t.numel() * t.element_size() for part in parts for t in (part.a, part.b))


class LoraRows:
    """The adapters of a step, and the rows that each of them corrects."""

    __slots__ = ("_by_adapter", "_pointers", "_tiles", "adapters", "step")

    def __init__(self, adapters: Sequence[LoraWeights], adapter_of_row: npt.NDArray[np.int32]) -> None:
        """Groups rows by adapter. adapter_of_row: int32 [rows], indices into `adapters`; -1 for a row without an
        adapter.
        """
        self.adapters = adapters
        self._by_adapter: list[tuple[LoraWeights, Tensor]] | None = None
        self._tiles = cpu.tiles_of(adapter_of_row)
        self._pointers = (ctypes.c_void_p * len(adapters))(*(ctypes.addressof(each.table) for each in adapters))
        self.step = cpu.Step(ctypes.addressof(self._pointers), self._tiles.ctypes.data, len(self._tiles))
        """The C structure, which is valid as long as this object exists."""

    def by_adapter(self, device: torch.device) -> list[tuple[LoraWeights, Tensor]]:
        """Returns each adapter with its rows, int64 on `device`. All calls must pass the same device."""
        if self._by_adapter is None:
            rows: dict[int, list[int]] = {}
            for adapter, count, *of_tile in self._tiles.tolist():
                rows.setdefault(adapter, []).extend(of_tile[:count])
            self._by_adapter = [(self.adapters[n], torch.tensor(found, device=device)) for n, found in rows.items()]
        return self._by_adapter


def lora_reference(x: Tensor, out: Tensor, rows: LoraRows, site: int) -> None:
    """Computes `lora` in plain torch, row by row, as the reference."""
    for weights, of_adapter in rows.by_adapter(x.device):
        for part in weights.products[site]:
            a, b = part.a.float(), part.b.float().T.contiguous()
            for row in of_adapter.tolist():
                _add(out[row : row + 1], part, (b @ (a @ x[row].float() * part.scale))[None])


def lora(x: Tensor, out: Tensor, rows: LoraRows, site: int) -> None:
    """Adds the corrections for x [rows, in] to out [rows, outputs of the site], in place. The last dimensions are
    contiguous, and all tensors have the same dtype. The sums of a row are fp32, and are rounded once per part.
    """
    if x.device.type != "cpu":
        count_fallback("lora", f"no kernel for {x.device.type}", "in torch, adapter by adapter")
        return lora_by_adapter(x, out, rows, site)
    library = current()
    function = cpu.entry(library) if x.dtype in (torch.bfloat16, torch.float32) else None
    if function is None:
        if library.isa != "reference":
            count_fallback("lora", f"no fast path for {x.dtype}")
        return lora_reference(x, out, rows, site)
    sizes = (site, x.shape[1], x.stride(0), out.stride(0), int(x.dtype == torch.bfloat16), torch.get_num_threads())
    function(x.data_ptr(), out.data_ptr(), ctypes.addressof(rows.step), *sizes)


def lora_by_adapter(x: Tensor, out: Tensor, rows: LoraRows, site: int) -> None:
    """Makes the same corrections as `lora`, with two torch products for each part of an adapter. Bits may depend on the
    number of rows of an adapter.
    """
    for weights, index in rows.by_adapter(x.device):
        for part in weights.products[site]:
            low = F.linear(x[index].float(), part.a.float()) * part.scale
            changed = out[index]
            _add(changed, part, low @ part.b.float())
            out[index] = changed


def _add(out: Tensor, part: LoraPart, correction: Tensor) -> None:
    place = out[:, part.at : part.at + part.b.shape[1]]
    place.copy_(place.float() + correction)
