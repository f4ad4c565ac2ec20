"""Decodes the blocks of GGUF's quantized types into integers with fp32 scales and offsets.

The layouts are those of llama.cpp (ggml-common.h, ggml-quants.c). A row of a matrix is a row of blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.quantization import Bits, QuantizedWeight

F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 2, 3, 8, 12, 14, 30
"""Numbers of the types in a GGUF file."""


def _half(blocks: Tensor) -> Tensor:
    """Converts fp16 numbers, given as bytes [..., 2], to fp32 [..., 1]."""
    return blocks.contiguous().view(torch.float16).float()


def _weight(values: Tensor, scales: Tensor, offsets: Tensor | None, bits: Bits, group: int) -> QuantizedWeight:
    """Returns a weight with values [out, ...] in the order of inputs, and scales and offsets in the order of groups."""
    n_out = values.shape[0]
    flat = None if offsets is None else offsets.reshape(n_out, -1).contiguous()
    integers = values.reshape(n_out, -1).to(torch.int8).contiguous()
    return QuantizedWeight(integers, scales.reshape(n_out, -1).contiguous(), flat, bits, group)


def _nibbles(bytes_: Tensor) -> Tensor:
    """Splits bytes [..., n] into values [..., 2 n]. All low halves come first, followed by all high halves."""
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim=-1)


def q8_0(rows: Tensor) -> QuantizedWeight:
    """Decodes blocks of 32 values. A block contains an fp16 scale, followed by the int8 values."""
    blocks = rows.view(rows.shape[0], -1, 34)
    return _weight(blocks[..., 2:].contiguous().view(torch.int8), _half(blocks[..., :2]), None, 8, 32)


def q4_0(rows: Tensor) -> QuantizedWeight:
    """Decodes blocks of 32 values. A block contains an fp16 scale, followed by the values + 8 in 16 bytes."""
    blocks = rows.view(rows.shape[0], -1, 18)
    return _weight(_nibbles(blocks[..., 2:]).to(torch.int8) - 8, _half(blocks[..., :2]), None, 4, 32)


def q4_1(rows: Tensor) -> QuantizedWeight:
    """Decodes blocks of 32 values. A block contains an fp16 scale and an fp16 offset, followed by the values in 16
    bytes.
    """
    blocks = rows.view(rows.shape[0], -1, 20)
    scales, offsets = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return _weight(_nibbles(blocks[..., 4:]).to(torch.int8) - 8, scales, offsets + 8 * scales, 4, 32)


def q4_k(rows: Tensor) -> QuantizedWeight:
    """Decodes blocks of 256 values in 8 groups. A block contains an fp16 scale and an fp16 offset, 12 bytes with each
    group's 6-bit factors for the two, and the values in 128 bytes.
    """
    blocks = rows.view(rows.shape[0], -1, 144)
    packed = blocks[..., 4:16].to(torch.int32)
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale_bits = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)  # [out, blocks, 8]
    offset_bits = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    scales, offsets = _half(blocks[..., :2]) * scale_bits, _half(blocks[..., 2:4]) * offset_bits
    values = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return _weight(values.to(torch.int8) - 8, scales, 8 * scales - offsets, 4, 32)


def q6_k(rows: Tensor) -> QuantizedWeight:
    """Decodes blocks of 256 values in 16 groups. A block contains the low 4 bits of the values + 32 in 128 bytes, their
    high 2 bits in 64 bytes, each group's int8 factor for the scale, and the fp16 scale.
    """
    blocks = rows.view(rows.shape[0], -1, 210)
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).view(*blocks.shape[:2], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    values = (low | (high >> shifts & 3) << 4).to(torch.int8) - 32
    scales = _half(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8)
    return _weight(values, scales, None, 8, 16)


DECODERS: dict[int, Callable[[Tensor], QuantizedWeight]] = {
    Q8_0: q8_0, Q4_0: q4_0, Q4_1: q4_1, Q4_K: q4_k, Q6_K: q6_k,
}  # fmt: skip
"""Decoders by type number. Matrices of other types are converted to floats."""
