"""Converts quantized checkpoints (GPTQ, AWQ, compressed-tensors, FP8 and GGUF) to weights for kernels.

Weights of 4 or 8 bits in integer formats become `QuantizedWeight`s. FP8 weights become floats. Activations are not
quantized, even if the checkpoint's configuration requires it. Layouts are those of AutoGPTQ, AutoAWQ, llm-compressor
and transformers. An int32 word contains 32 / `bits` values, the first one in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from engine import gguf_blocks
from engine.errors import ModelError, UnsupportedModel
from kernels.quantization import UNIT, Bits, QuantizedWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, among eight, to which each value in a word of AWQ belongs."""
IGNORED_SUFFIXES = (".g_idx", ".weight_g_idx", ".weight_shape", ".input_scale", ".input_zero_point", ".output_scale")
"""Endings of the names of tensors of quantized layers that may remain unread."""


class RawTensors(Protocol):
    """The interface of a source of a checkpoint's tensors in their stored form."""

    def has(self, name: str) -> bool: ...

    def raw(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """The name and size of a matrix that a layer expects. The names of its tensors begin with `name`."""

    name: str
    n_out: int
    n_in: int


class WeightFormat(Protocol):
    """The interface of a storage format for matrices."""

    def read(self, tensors: RawTensors, matrix: Matrix) -> QuantizedWeight | Tensor | None:
        """Returns the weight [out, in], as floats if it is stored in FP8, or None if the caller must read it as floats.
        Raises ModelError if the stored tensors do not fit the matrix or are not supported.
        """


def read_format(raw: Mapping[str, Any]) -> WeightFormat | None:
    """Returns the quantization format that config.json names, or None. Raises UnsupportedModel if the format is not
    supported.
    """
    config = raw.get("quantization_config") or raw.get("compression_config")
    if not config:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    readers: dict[Any, Callable[[dict[str, Any]], WeightFormat]] = {
        "gptq": _gptq,
        "awq": _awq,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "gguf": lambda _: Gguf(),
    }
    if method not in readers:
        names = ", ".join(readers)
        raise UnsupportedModel(f"quantization_config ({method or 'unknown'}) is not supported; only {names} are")
    return readers[method](cast(dict[str, Any], config))


def _allowed(config: Mapping[str, Any], method: str, **allowed: Sequence[Any]) -> None:
    """Raises UnsupportedModel if a field does not have an allowed value. The first allowed value is the default."""
    for field, values in allowed.items():
        if (found := config.get(field, values[0])) not in values:
            supported = ", ".join(map(str, values))
            raise UnsupportedModel(
                f"quantization_config ({method}): {field}={found} is not supported; supported: {supported}"
            )


def _group(size: int, n_in: int, name: str) -> int:
    """Returns the number of inputs in a group: `size`, or all inputs if `size` is -1."""
    group = n_in if size == -1 else size
    if group <= 0 or group % UNIT:
        raise UnsupportedModel(f"{name} has groups of {group} inputs; only multiples of {UNIT} are supported")
    return group


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the unsigned values in int32 words [..., words] as int32 [..., words * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _expect(matrix: Matrix, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"tensor {matrix.name}.{what} has shape {list(tensor.shape)}, but the config requires {list(shape)}"
        )


def _integers(values: Tensor, zeros: Tensor | None, scales: Tensor, bits: Bits, group: int) -> QuantizedWeight:
    """Returns the weight with unsigned values [out, in], zero points and scales [out, groups]. If `zeros` is None, the
    zero point is the middle of the range.
    """
    middle, scales = 1 << bits - 1, scales.float()
    offsets = None
    if zeros is not None and bool((zeros != middle).any()):
        offsets = scales * (middle - zeros)
    return QuantizedWeight((values - middle).to(torch.int8).contiguous(), scales.contiguous(), offsets, bits, group)


# --- GPTQ


@dataclass(frozen=True, slots=True)
class Gptq:
    """The GPTQ format. It stores qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32] and scales
    [groups, out].
    """

    bits: Bits
    group_size: int
    zero_add: int
    """The value that is added to a stored zero point: 1 in the original format, 0 in gptq_v2."""

    def read(self, tensors: RawTensors, matrix: Matrix) -> QuantizedWeight | None:
        name, n_out, n_in = matrix.name, matrix.n_out, matrix.n_in
        if not tensors.has(f"{name}.qweight"):
            return None
        group, per_word = _group(self.group_size, n_in, name), 32 // self.bits
        groups = -(-n_in // group)
        words, zeros = tensors.raw(f"{name}.qweight"), tensors.raw(f"{name}.qzeros")
        scales = tensors.raw(f"{name}.scales")
        _expect(matrix, "qweight", words, (n_in // per_word, n_out))
        _expect(matrix, "qzeros", zeros, (groups, n_out // per_word))
        _expect(matrix, "scales", scales, (groups, n_out))
        if tensors.has(f"{name}.g_idx"):
            in_order = torch.arange(n_in, dtype=torch.int32) // group
            if not torch.equal(tensors.raw(f"{name}.g_idx").to(torch.int32), in_order):
                raise UnsupportedModel(f"{name}.g_idx is not in order (desc_act); only groups in order are supported")
        values = unpacked(words.T.contiguous(), self.bits)
        return _integers(values, unpacked(zeros, self.bits).T + self.zero_add, scales.T, self.bits, group)


def _gptq(config: dict[str, Any]) -> Gptq:
    _allowed(config, "gptq", bits=(4, 8), checkpoint_format=("gptq", "gptq_v2"))
    bits = cast(Bits, config.get("bits", 4))
    return Gptq(bits, int(config.get("group_size", 128)), int(config.get("checkpoint_format", "gptq") == "gptq"))


# --- AWQ


@dataclass(frozen=True, slots=True)
class Awq:
    """The AWQ format. It stores qweight int32 [in, out / 8], qzeros int32 [groups, out / 8] and scales [groups, out].
    The outputs in a word are in AWQ_ORDER.
    """

    group_size: int

    def read(self, tensors: RawTensors, matrix: Matrix) -> QuantizedWeight | None:
        name, n_out, n_in = matrix.name, matrix.n_out, matrix.n_in
        if not tensors.has(f"{name}.qweight"):
            return None
        group = _group(self.group_size, n_in, name)
        groups = -(-n_in // group)
        words, zeros = tensors.raw(f"{name}.qweight"), tensors.raw(f"{name}.qzeros")
        scales = tensors.raw(f"{name}.scales")
        _expect(matrix, "qweight", words, (n_in, n_out // 8))
        _expect(matrix, "qzeros", zeros, (groups, n_out // 8))
        _expect(matrix, "scales", scales, (groups, n_out))
        return _integers(_in_order(words).T, _in_order(zeros).T, scales.T, 4, group)


def _in_order(words: Tensor) -> Tensor:
    stored = unpacked(words, 4).view(*words.shape, 8)
    return stored[..., torch.tensor(AWQ_ORDER).argsort()].flatten(-2)


def _awq(config: dict[str, Any]) -> Awq:
    _allowed(config, "awq", bits=(4,), version=("gemm", "GEMM"), zero_point=(True, False))
    return Awq(int(config.get("group_size", 128)))


# --- compressed-tensors


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The compressed-tensors formats. They store weight_packed int32 [out, in * bits / 32], weight_scale [out, groups]
    and an optional weight_zero_point int32 [out * bits / 32, groups], or `weight` in int8 or FP8 and weight_scale.
    """

    bits: Bits
    group_size: int

    def read(self, tensors: RawTensors, matrix: Matrix) -> QuantizedWeight | Tensor | None:
        name, n_out, n_in = matrix.name, matrix.n_out, matrix.n_in
        if not tensors.has(f"{name}.weight_scale"):
            return None
        scales = tensors.raw(f"{name}.weight_scale")
        if not tensors.has(f"{name}.weight_packed"):
            return self._naive(tensors, matrix, scales)
        group, per_word = _group(self.group_size, n_in, name), 32 // self.bits
        words = tensors.raw(f"{name}.weight_packed")
        _expect(matrix, "weight_packed", words, (n_out, -(-n_in // per_word)))
        _expect(matrix, "weight_scale", scales, (n_out, -(-n_in // group)))
        if tensors.has(f"{name}.weight_g_idx"):
            raise UnsupportedModel(f"{name}.weight_g_idx (actorder=group) is not supported")
        zeros = None
        if tensors.has(f"{name}.weight_zero_point"):
            zeros = unpacked(tensors.raw(f"{name}.weight_zero_point").T.contiguous(), self.bits).T[:n_out]
        return _integers(unpacked(words, self.bits)[:, :n_in], zeros, scales, self.bits, group)

    def _naive(self, tensors: RawTensors, matrix: Matrix, scales: Tensor) -> QuantizedWeight | Tensor:
        weight = tensors.raw(f"{matrix.name}.weight")
        _expect(matrix, "weight", weight, (matrix.n_out, matrix.n_in))
        if weight.dtype == torch.float8_e4m3fn:
            return weight.float() * _spread(scales.float(), weight.shape)
        if weight.dtype != torch.int8 or tensors.has(f"{matrix.name}.weight_zero_point"):
            raise UnsupportedModel(f"{matrix.name}.weight ({weight.dtype}) must be FP8, or int8 without zero points")
        group = _group(self.group_size, matrix.n_in, matrix.name)
        groups = -(-matrix.n_in // group)
        spread = scales.float().view(-1, scales.numel() // scales.shape[0] if scales.dim() else 1)
        return QuantizedWeight(weight, spread.expand(matrix.n_out, groups).contiguous(), None, 8, group)


def _compressed_tensors(config: dict[str, Any]) -> CompressedTensors:
    method = "compressed-tensors"
    formats = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
    _allowed(config, method, format=formats, quantization_status=("compressed",))
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise UnsupportedModel(f"quantization_config ({method}) has {len(groups)} config_groups; only one is supported")
    weights = groups[0].get("weights") or {}
    _allowed(weights, method, num_bits=(8, 4), type=("int", "float"), strategy=("group", "channel", "tensor"))
    _allowed(weights, method, actorder=(None, "weight", "static"))
    return CompressedTensors(cast(Bits, weights.get("num_bits", 8)), int(weights.get("group_size") or -1))


# --- FP8


@dataclass(frozen=True, slots=True)
class Fp8:
    """The FP8 format. It stores weight float8_e4m3fn [out, in] and its scales, weight_scale_inv or weight_scale."""

    block: tuple[int, int] | None

    def read(self, tensors: RawTensors, matrix: Matrix) -> Tensor | None:
        name = next(
            (n for n in (f"{matrix.name}.weight_scale_inv", f"{matrix.name}.weight_scale") if tensors.has(n)), None
        )
        if name is None:
            return None
        weight, scales = tensors.raw(f"{matrix.name}.weight"), tensors.raw(name).float()
        _expect(matrix, "weight", weight, (matrix.n_out, matrix.n_in))
        if self.block is not None and scales.dim() == 2:
            rows, columns = self.block
            scales = scales.repeat_interleave(rows, 0)[: matrix.n_out].repeat_interleave(columns, 1)[:, : matrix.n_in]
        return weight.float() * _spread(scales, weight.shape)


def _fp8(config: dict[str, Any]) -> Fp8:
    _allowed(config, "fp8", fmt=("e4m3",))
    block = config.get("weight_block_size")
    return Fp8((int(block[0]), int(block[1])) if block else None)


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Returns scales in a shape that broadcasts to `shape`. There may be one scale for all elements, one per output, or
    one per element.
    """
    if scales.numel() == 1:
        return scales.view(1, 1)
    return scales.view(shape[0], -1) if scales.numel() != shape.numel() else scales.view(shape)


# --- GGUF


@dataclass(frozen=True, slots=True)
class Gguf:
    """The GGUF format. It stores blocks uint8 [out, bytes], and the number of their type."""

    def read(self, tensors: RawTensors, matrix: Matrix) -> QuantizedWeight | None:
        name = f"{matrix.name}.weight"
        decode = gguf_blocks.DECODERS.get(int(tensors.raw(f"{name}.type"))) if tensors.has(name) else None
        if decode is None:
            return None
        found = decode(tensors.raw(f"{name}.blocks"))
        if found.shape != (matrix.n_out, matrix.n_in):
            want = [matrix.n_out, matrix.n_in]
            raise ModelError(f"tensor {name} has shape {list(found.shape)}, but the config requires {want}")
        return found
