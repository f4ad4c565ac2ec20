"""A whole pass of a decoder as one C call: the structures of forward.cpp, and the call.

Fields are those of forward.cpp, in its order: pointers and 64-bit integers, floats last. Does not depend on steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.cpu.ops import raise_for
from kernels.cpu.selection import CpuLibrary

I64, F32, PTR = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
ALIGNMENT = 64
"""Alignment, in bytes, of every array in the scratch memory."""


class Linear(ctypes.Structure):
    """A packed product. `entry` is its entry point (for AMX tiles or for integers), or null for `ll_linear`. A product
    whose inputs are divided has the weights of `num_parts` parts in `parts` instead of `packed`. `site` is the number
    by which adapters correct it, or -1.
    """

    _fields_ = [(name, PTR) for name in ("packed", "bias", "entry", "parts")] + [
        (name, I64) for name in ("n_in", "n_out", "num_parts", "site")
    ]


class Layer(ctypes.Structure):
    """Parameters of one layer and the addresses of its keys and values in the arena. All norms except those before the
    sublayers may be null. A window of 0 means that there is no window. `experts` has two Linears per expert, gate_up
    and down; if it is null, the layer has one MLP.
    """

    _fields_ = [
        *((name, PTR) for name in ("input_norm", "q_norm", "k_norm", "attention_norm", "mlp_norm", "output_norm")),
        *((name, PTR) for name in ("keys", "values", "cos_sin", "experts")),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down", "router")),
        *((name, I64) for name in ("group", "window")),
    ]


class Model(ctypes.Structure):
    """The parameters and sizes of a model. `cache_*` are the strides of a layer's keys and values, in elements. `inner`
    is the width of the widest MLP or expert. With `wide_norms` the weights of norms are fp32. A softcap of 0 means that
    there is no softcap.
    """

    _fields_ = [
        *((name, PTR) for name in ("embed", "layers", "norm", "ranks")),
        ("lm_head", Linear),
        ("num_sums", I64),
        *((name, I64) for name in ("num_layers", "vocab", "heads", "kv_heads", "d", "max_pos", "rotary")),
        *((name, I64) for name in ("is_bf16", "inner", "gelu", "wide_norms")),
        *((name, I64) for name in ("num_experts", "per_token", "renormalize", "round_weights")),
        *((name, I64) for name in ("num_blocks", "block_size", "cache_block", "cache_head", "cache_slot")),
        ("kv_type", I64),
        *((name, F32) for name in ("eps", "scale", "softcap", "logits_softcap", "embed_scale")),
    ]


class Group(ctypes.Structure):
    """The slots and the block table of one KV group in a step."""

    _fields_ = [
        *((name, PTR) for name in ("slots", "table")),
        *((name, I64) for name in ("table_row", "table_width")),
    ]


class Pass(ctypes.Structure):
    """The arrays of one step. If cu_seqlens_q is null, there is one query per sequence; if rows is null, logits of
    every token are computed. lora and lora_of_rows are `kernels.cpu.lora.Step`s, or null if no row has an adapter.
    """

    _fields_ = [
        *((name, PTR) for name in ("tokens", "positions", "groups", "context_lens", "cu_seqlens_q", "rows")),
        *((name, PTR) for name in ("scratch", "logits", "lora", "lora_of_rows")),
        *((name, I64) for name in ("num_tokens", "num_seqs", "num_rows", "threads")),
    ]


Entry = Callable[[Model, Pass], None]


def entry(library: CpuLibrary) -> Entry | None:
    """Returns the function of a build that runs a pass, or None if the build does not contain it. The function raises
    ValueError for a token, position, slot or block out of range.
    """
    if library.handle is None or not hasattr(library.handle, "ll_forward"):
        return None
    function = library.handle["ll_forward"]
    function.argtypes, function.restype = [PTR, PTR], ctypes.c_int

    def run(model: Model, step: Pass) -> None:
        raise_for(function(ctypes.addressof(model), ctypes.addressof(step)))

    return run


def scratch_bytes(model: Model, num_tokens: int, num_rows: int) -> int:
    """Returns the number of bytes of scratch memory that a pass needs. Must agree with forward.cpp."""
    size = 2 if model.is_bf16 else 4
    hidden, q_width, most = model.lm_head.n_in, model.heads * model.d, max(num_tokens, num_rows)
    qkv_width = q_width + 2 * model.kv_heads * model.d
    attention = _taken(num_tokens * qkv_width * size, num_tokens * q_width * size)
    mlp = _taken(most * 2 * model.inner * size, most * model.inner * size)
    if model.num_experts:
        of_rows = (model.num_experts * size, model.per_token * 4, model.per_token * 8, 8, hidden * size, hidden * size)
        mlp += _taken(*(most * each for each in of_rows))
    logits = _taken(num_rows * model.lm_head.n_out * size)
    sums = _taken(model.num_sums * num_tokens * hidden * 4)
    return _taken(*[num_tokens * hidden * size] * 3) + sums + max(attention, mlp, logits)


def _taken(*num_bytes: int) -> int:
    return sum(-(-count // ALIGNMENT) * ALIGNMENT for count in num_bytes)


def address(array: npt.NDArray[np.generic]) -> int:
    """Returns the address of the array's first element."""
    at: int = array.__array_interface__["data"][0]
    return at


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def scratch(num_bytes: int) -> Tensor:
    """Allocates uint8 [>= num_bytes], aligned to `ALIGNMENT`."""
    memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :]
