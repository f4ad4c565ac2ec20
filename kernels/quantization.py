"""Represents weights of 4 or 8 bits with scales, and rounds matrices of floats to such weights.

A weight is value * scale + offset. The weights of one output and `group` consecutive inputs share a scale and, if there
are offsets, an offset. All supported integer formats (GPTQ, AWQ, compressed-tensors, GGUF's Q4_0, Q4_1, Q4_K, Q6_K and
Q8_0) have this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

Bits = Literal[4, 8]
GROUPS: dict[Bits, int] = {4: 64, 8: 128}
"""Number of inputs that share a scale when a matrix of floats is rounded, by number of bits."""
UNIT = 8
"""The size of every group is a multiple of UNIT."""
_SHRINKS = (0.98, 0.96, 0.94, 0.92, 0.9, 0.88, 0.86, 0.84, 0.82, 0.8, 0.78, 0.76)
"""Additional scales that rounding to 4 bits tries, relative to the scale that makes the weight of largest magnitude -8.
"""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out, in] whose element (o, i) is values[o, i] * scales[o, i // group] + offsets[o, i // group]."""

    values: Tensor
    """int8 [out, in]; 4-bit values are from -8 to 7."""
    scales: Tensor
    """fp32 or bf16 [out, ceil(in / group)]."""
    offsets: Tensor | None
    """Same dtype and shape as the scales; None if all are zero."""
    bits: Bits
    group: int

    def __post_init__(self) -> None:
        if self.group % UNIT or self.group < UNIT:
            raise ValueError(f"group is {self.group}, but must be a multiple of {UNIT}")
        n_out, n_in = self.values.shape
        shape = (n_out, -(-n_in // self.group))
        for name, factors in (("scales", self.scales), ("offsets", self.offsets)):
            if factors is not None and (factors.shape != shape or factors.dtype != self.scales.dtype):
                raise ValueError(
                    f"{name} are {factors.dtype} {list(factors.shape)}, but must be {self.scales.dtype} {list(shape)}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        n_out, n_in = self.values.shape
        return n_out, n_in

    @property
    def num_bytes(self) -> int:
        """Number of bytes of values, scales and offsets in the packed form, without padding."""
        factors = self.scales.numel() * self.scales.element_size() * (1 + (self.offsets is not None))
        return self.values.numel() * self.bits // 8 + factors

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns the matrix [out, in] as floats of `dtype`."""
        n_in = self.values.shape[1]

        def spread(factors: Tensor) -> Tensor:
            return factors.float().repeat_interleave(self.group, dim=1)[:, :n_in]

        found = self.values.float() * spread(self.scales)
        return (found if self.offsets is None else found + spread(self.offsets)).to(dtype)

    def to(self, device: torch.device) -> Self:
        """Returns the weight with its tensors on `device`."""
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device), offsets=offsets)

    @property
    def form(self) -> tuple[Bits, int, bool, torch.dtype]:
        """The properties that must be equal for matrices to be stored as one."""
        return self.bits, self.group, self.offsets is None, self.scales.dtype

    def above(self, other: Self) -> Self:
        """Returns a matrix that consists of this matrix and, below it, another matrix of the same form."""
        assert self.form == other.form
        offsets = None
        if self.offsets is not None and other.offsets is not None:
            offsets = torch.cat((self.offsets, other.offsets))
        values, scales = torch.cat((self.values, other.values)), torch.cat((self.scales, other.scales))
        return replace(self, values=values, scales=scales, offsets=offsets)


def merged(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Returns `parts` with adjacent matrices of the same form stacked into one."""
    found = [parts[0]]
    for part in parts[1:]:
        found[-1:] = [found[-1].above(part)] if found[-1].form == part.form else [found[-1], part]
    return found


def quantize(weight: Tensor, bits: Bits) -> QuantizedWeight:
    """Rounds a matrix [out, in] to `bits` bits, with a bf16 scale for every GROUPS[bits] inputs of an output and no
    offsets.

    With 8 bits, the scale makes the largest magnitude of a group 127. With 4 bits, several scales are tried, and each
    group uses the one with the smallest squared error. The largest of these scales makes the weight of largest
    magnitude -8.
    """
    n_out, n_in = weight.shape
    group = GROUPS[bits]
    groups = -(-n_in // group)
    padded = torch.nn.functional.pad(weight.float(), (0, groups * group - n_in)).view(n_out, groups, group)
    if bits == 8:
        values, scales = _rounded(padded, padded.abs().amax(-1) / 127, 8)
    else:
        values, scales = _best_of_several(padded)
    return QuantizedWeight(values.view(n_out, -1)[:, :n_in].contiguous(), scales, None, bits, group)


def _best_of_several(weight: Tensor) -> tuple[Tensor, Tensor]:
    extreme = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))[..., 0] / -8
    values, scales = _rounded(weight, extreme, 4)
    least = _error(weight, values, scales)
    for shrink in _SHRINKS:
        tried, with_scales = _rounded(weight, extreme * shrink, 4)
        error = _error(weight, tried, with_scales)
        better = error < least
        values, scales = torch.where(better[..., None], tried, values), torch.where(better, with_scales, scales)
        least = torch.where(better, error, least)
    return values, scales


def _rounded(weight: Tensor, scales: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Rounds a matrix that is divided into groups. Returns int8 values [out, groups, group], and the scales [out,
    groups] in bf16.
    """
    scales = scales.bfloat16()
    by = torch.where(scales == 0, 1.0, scales.float())[..., None]
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    return (weight / by).round().clamp(low, high).to(torch.int8), scales


def _error(weight: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    return (values * scales.float()[..., None] - weight).square().sum(-1)
