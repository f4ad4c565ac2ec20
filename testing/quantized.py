"""Writes tiny checkpoints in quantized formats, each with an fp32 twin that has the same weights. The code does not use
the product's code that reads these formats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import Family
from engine.tiny import make_checkpoint

GROUP = 32
ROUTER = ".gate.weight"
"""The suffix of the names of router weights, which are not quantized."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantized matrix. `tensors` contains its tensors by the suffixes of their names, and `numbers` the weights
    [out, in] that they encode.
    """

    tensors: dict[str, Tensor]
    numbers: Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """The quantization_config of a format, and a function that encodes a matrix in the format."""

    config: dict[str, Any]
    store: Callable[[Tensor], Stored]


def make_quantized(directory: Path, twin: Path, form: Format, family: Family = "llama", seed: int = 0) -> None:
    """Writes a random model in a format to `directory`, and an fp32 model with the same weights to `twin`."""
    make_checkpoint(twin, family, seed=seed, intermediate_size=160)
    shutil.copytree(twin, directory, dirs_exist_ok=True)
    tensors = load_file(twin / "model.safetensors")
    quantized: dict[str, Tensor] = {}
    for name, tensor in list(tensors.items()):
        if ".layers." in name and tensor.dim() == 2 and not name.endswith(ROUTER):
            stored = form.store(tensor)
            quantized |= {name.removesuffix("weight") + suffix: each for suffix, each in stored.tensors.items()}
            tensors[name] = stored.numbers.float().contiguous()
        else:
            quantized[name] = tensor
    save_file(tensors, twin / "model.safetensors", metadata={"format": "pt"})
    save_file({name: each.contiguous() for name, each in quantized.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))


def packed(values: Ints, bits: int) -> Tensor:
    """Packs unsigned values along the last axis into int32 words. The first value is in the lowest bits of a word."""
    per_word = 32 // bits
    words = np.zeros((*values.shape[:-1], values.shape[-1] // per_word), np.uint32)
    for i in range(per_word):
        words |= (values[..., i::per_word].astype(np.uint32) << np.uint32(bits * i)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32).copy())


def _rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Ints, Ints, npt.NDArray[np.float32]]:
    """Returns values q [out, in] and zeros z [out, groups], both unsigned, and fp16 scales s [out, groups] as fp32."""
    w = weight.numpy().reshape(len(weight), -1, group)
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scales = np.abs(w).max(-1) / (middle - 1)
        zeros = np.full(scales.shape, middle)
    else:
        scales = (w.max(-1) - w.min(-1)) / top
        zeros = np.clip(np.round(-w.min(-1) / scales), 1, top).astype(np.int64)
    scales = scales.astype(np.float16).astype(np.float32)
    q = np.clip(np.round(w / scales[..., None]) + zeros[..., None], 0, top).astype(np.int64)
    return q.reshape(weight.shape), zeros.astype(np.int64), scales


def _numbers(q: Ints, zeros: Ints, scales: npt.NDArray[np.float32], group: int) -> Tensor:
    spread = np.repeat(scales, group, axis=1).astype(np.float64)
    return torch.from_numpy(spread * (q - np.repeat(zeros, group, axis=1)))


def _half(scales: npt.NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(scales.copy()).half()


def gptq(bits: int, *, symmetric: bool, version: str = "gptq") -> Format:
    def store(weight: Tensor) -> Stored:
        q, zeros, scales = _rounded(weight, bits, GROUP, symmetric=symmetric)
        tensors = {
            "qweight": packed(q, bits).T,  # words run along the inputs, which come first
            "qzeros": packed((zeros - (version == "gptq")).T.copy(), bits),
            "scales": _half(scales.T),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
        }
        return Stored(tensors, _numbers(q, zeros, scales, GROUP))

    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False}
    return Format({**config, "checkpoint_format": version}, store)


def awq() -> Format:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def shuffled(values: Ints) -> Ints:
        return values.reshape(*values.shape[:-1], -1, 8)[..., order].reshape(values.shape)

    def store(weight: Tensor) -> Stored:
        q, zeros, scales = _rounded(weight, 4, GROUP, symmetric=False)
        tensors = {
            "qweight": packed(shuffled(q.T.copy()), 4),
            "qzeros": packed(shuffled(zeros.T.copy()), 4),
            "scales": _half(scales.T),
        }
        return Stored(tensors, _numbers(q, zeros, scales, GROUP))

    return Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, store)


def _of_llm_compressor(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def pack_quantized(*, symmetric: bool) -> Format:
    def store(weight: Tensor) -> Stored:
        q, zeros, scales = _rounded(weight, 4, GROUP, symmetric=symmetric)
        tensors = {
            "weight_packed": packed(q, 4),
            "weight_scale": _half(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zeros.T.copy(), 4).T  # packed along the outputs
        return Stored(tensors, _numbers(q, zeros, scales, GROUP))

    how = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    return Format(_of_llm_compressor("pack-quantized", **how), store)


def int_quantized() -> Format:
    def store(weight: Tensor) -> Stored:
        scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        q = (weight / scales).round().clamp(-127, 127)
        return Stored({"weight": q.to(torch.int8), "weight_scale": scales}, q.double() * scales.double())

    return Format(_of_llm_compressor("int-quantized", num_bits=8, type="int", strategy="channel"), store)


def _fp8(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return stored, stored.double() * scales.double()


def float_quantized() -> Format:
    def store(weight: Tensor) -> Stored:
        scales = weight.abs().amax(1, keepdim=True) / 448
        stored, numbers = _fp8(weight, scales)
        return Stored({"weight": stored, "weight_scale": scales}, numbers)

    return Format(_of_llm_compressor("float-quantized", num_bits=8, type="float", strategy="channel"), store)


def fp8(*, blocks: bool) -> Format:
    def store(weight: Tensor) -> Stored:
        if not blocks:
            scale = weight.abs().max() / 448
            stored, numbers = _fp8(weight, scale)
            return Stored({"weight": stored, "weight_scale": scale, "input_scale": torch.tensor(1.0)}, numbers)
        n_out, n_in = weight.shape
        scales = torch.rand(-(-n_out // 48), -(-n_in // 32)) / 100 + 0.001
        spread = scales.repeat_interleave(48, 0)[:n_out].repeat_interleave(32, 1)[:, :n_in]
        stored, numbers = _fp8(weight, spread)
        return Stored({"weight": stored, "weight_scale_inv": scales}, numbers)

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return Format(config | ({"weight_block_size": [48, 32]} if blocks else {}), store)


FORMATS = {
    "gptq-4": gptq(4, symmetric=True),
    "gptq-4-zeros": gptq(4, symmetric=False),
    "gptq-8": gptq(8, symmetric=True),
    "gptq-v2-zeros": gptq(4, symmetric=False, version="gptq_v2"),
    "awq": awq(),
    "pack-quantized": pack_quantized(symmetric=True),
    "pack-quantized-zeros": pack_quantized(symmetric=False),
    "int-quantized": int_quantized(),
    "float-quantized": float_quantized(),
    "fp8": fp8(blocks=False),
    "fp8-blocks": fp8(blocks=True),
}
