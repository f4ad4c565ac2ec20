"""Runs a whole pass of a decoder in one C call. The structures have the same fields, in the same order, as those in
forward.cpp.
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
    """A packed linear layer. `entry` is its C function (for AMX tiles or for integers), or null for `ll_linear`. If its
    inputs are divided, `parts` contains the weights of `num_parts` parts, and `packed` is not used. `site` is the
    layer's index in the tables of adapters, or -1 if no adapter can change the layer.
    """

    _fields_ = [(name, PTR) for name in ("packed", "bias", "entry", "parts")] + [
        (name, I64) for name in ("n_in", "n_out", "num_parts", "site")
    ]


class Layer(ctypes.Structure):
    """The C structure of one layer's parameters, and of the addresses of its keys and values in the arena. Norms other
    than those before the sublayers may be null. A window of 0 means that there is no window. `experts` has two Linears
    for each expert, gate_up and down; it is null if the layer has a single MLP.
    """

    _fields_ = [
        *((name, PTR) for name in ("input_norm", "q_norm", "k_norm", "attention_norm", "mlp_norm", "output_norm")),
        *((name, PTR) for name in ("keys", "values", "cos_sin", "experts")),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down", "router")),
        *((name, I64) for name in ("group", "window")),
    ]


class Model(ctypes.Structure):
    """The C structure of the parameters and sizes of a model or of a stage. A stage other than the first stage has no
    `embed`, and a stage other than the last stage has no `norm` and no `lm_head`. `cache_*` are the strides of a
    layer's keys and values, in elements; with `by_word`, keys are stored by word, as if each had a row. `inner` is the
    width of the widest MLP or expert. With `wide_norms`, the weights of norms are fp32. A softcap of 0 means that there
    is no softcap.
    """

    _fields_ = [
        *((name, PTR) for name in ("embed", "layers", "norm", "ranks")),
        ("lm_head", Linear),
        ("num_sums", I64),
        *((name, I64) for name in ("num_layers", "hidden", "vocab", "heads", "kv_heads", "d", "max_pos", "rotary")),
        *((name, I64) for name in ("is_bf16", "inner", "gelu", "wide_norms")),
        *((name, I64) for name in ("num_experts", "per_token", "renormalize", "round_weights")),
        *((name, I64) for name in ("num_blocks", "block_size", "cache_block", "cache_head", "cache_slot")),
        *((name, I64) for name in ("by_word", "kv_type")),
        *((name, F32) for name in ("eps", "scale", "softcap", "logits_softcap", "embed_scale")),
    ]


class Group(ctypes.Structure):
    """The slots and the block table of one KV group in a step."""

    _fields_ = [
        *((name, PTR) for name in ("slots", "table")),
        *((name, I64) for name in ("table_row", "table_width")),
    ]


class Draw(ctypes.Structure):
    """The C structure of the tokens to draw, int64 [R], and of the parameters of `kernels.sampling.sample`."""

    _fields_ = [
        (name, PTR) for name in ("ids", "temperature", "top_p", "min_p", "top_k", "seeds", "samples", "positions")
    ]


class Pass(ctypes.Structure):
    """The C structure of one step's arrays. If cu_seqlens_q is null, there is one query per sequence; if rows is null,
    logits of every token are computed. lora and lora_of_rows are `kernels.cpu.lora.Step`s, or null if no row has an
    adapter. `states` [T, h] are the inputs of a stage without `embed`, which may overwrite them, and the outputs of a
    stage without `norm`. If `draw` is not null, tokens are drawn from the logits.
    """

    _fields_ = [
        *((name, PTR) for name in ("tokens", "positions", "groups", "context_lens", "cu_seqlens_q", "rows")),
        *((name, PTR) for name in ("scratch", "states", "logits", "lora", "lora_of_rows", "draw")),
        *((name, I64) for name in ("num_tokens", "num_seqs", "num_rows", "threads")),
    ]


Entry = Callable[[Model, Pass], None]


def entry(library: CpuLibrary) -> Entry | None:
    """Returns the function of a build that runs a pass, or None if the build has none. The function raises ValueError
    if a token, position, slot or block is out of range, or if a rank has closed its connection.
    """
    if library.handle is None or not hasattr(library.handle, "ll_forward"):
        return None
    function = library.handle["ll_forward"]
    function.argtypes, function.restype = [PTR, PTR], ctypes.c_int

    def run(model: Model, step: Pass) -> None:
        raise_for(function(ctypes.addressof(model), ctypes.addressof(step)))

    return run


def scratch_bytes(model: Model, num_tokens: int, num_rows: int) -> int:
    """Returns the number of bytes of scratch memory that a pass needs. The rule must agree with forward.cpp."""
    size = 2 if model.is_bf16 else 4
    hidden, q_width, most = model.hidden, model.heads * model.d, max(num_tokens, num_rows)
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
    """Returns uninitialized memory, uint8 [>= num_bytes], aligned to `ALIGNMENT` bytes."""
    memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    return memory[-memory.data_ptr() % ALIGNMENT :]
