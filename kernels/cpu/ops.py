"""Registers the C entry points as torch operators (long: every operator has a wrapper here).

The namespace is `looseleaf`. Builds do not depend on the torch version. An operator writes to tensors that the caller
passes, and returns nothing. It uses at most as many threads as torch (`torch.get_num_threads`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cpu.selection import CpuLibrary, selection
from kernels.kv_cache import is_by_word

I64, F32, PTR = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

_ERRORS = {
    1: "a block table entry that a visible key needs is out of range, or the table is too short",
    2: "cu_seqlens_q does not ascend within q, or a chunk is longer than its context",
    3: "a slot or position is out of range",
    4: "a block id is out of range",
    5: "a token id is out of range",
    6: "a rank of the worker has closed its connection",
}


def raise_for(code: int) -> None:
    if code:
        raise ValueError(_ERRORS.get(code, f"kernel error {code}"))


def _call(name: str, *arguments: int | float | None) -> None:
    """Calls a C function. Passes floats as C `float`, and other arguments as 64-bit integers or pointers."""
    library = selection().library
    assert library is not None, "operators are registered only when a library is selected"
    raise_for(entry(library, name)(*arguments))


_KV_TYPES = {torch.int8: 1, torch.float8_e4m3fn: 2}

_SIGNATURES: dict[str, list[type]] = {
    "ll_attention": [PTR] * 7 + [I64] * 24 + [PTR] + [F32] * 2,
    "ll_write_blocks": [PTR] * 8 + [I64] * 24,
    "ll_copy_blocks": [PTR] * 4 + [I64] * 7,
    "ll_rms_norm": [PTR] * 5 + [I64] * 7 + [F32],
    "ll_silu_mul": [PTR] * 2 + [I64] * 5,
    "ll_gelu_mul": [PTR] * 2 + [I64] * 5,
    "ll_softcap": [PTR] + [I64] * 2 + [F32],
    "ll_route": [PTR] * 3 + [I64] * 6,
    "ll_convolution": [PTR] * 8 + [I64] * 14,
    "ll_recurrence": [PTR] * 11 + [I64] * 12,
    "ll_sample": [PTR] * 9 + [I64] * 4,
    "ll_log_softmax_top": [PTR] * 6 + [I64] * 5,
    "ll_latest_ngram": [PTR] + [I64] * 3,
}


@functools.cache
def entry(library: CpuLibrary, name: str) -> Callable[..., int]:
    """Returns a C function that takes floats as C `float`, and other arguments as 64-bit integers or pointers."""
    assert library.handle is not None
    function = library.handle[name]
    function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_int
    return function  # type: ignore[no-any-return]


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _dtype(t: Tensor) -> int:
    return 1 if t.dtype == torch.bfloat16 else 0


def kv_type(cache: torch.dtype, q: torch.dtype) -> int:
    """Returns the number of a cache's type in the C++ kernels (kernels/cpu/entries.h), given the queries' dtype."""
    return 0 if cache == q else _KV_TYPES[cache]


def _key_strides(keys: Tensor) -> tuple[int, int, int]:
    """Returns the distances of blocks, heads and slots. Keys that are stored by word count as if each had a row."""
    block, head, slot = keys.stride()[:3]
    return block, head, keys.shape[2] * keys.shape[4] if is_by_word(keys) else slot


def _last_contiguous(*tensors: Tensor) -> None:
    if any(t.stride(-1) != 1 and t.shape[-1] != 1 for t in tensors):
        raise ValueError("the last dimension must be contiguous")


def _attention(
    out: Tensor,
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    softmax_scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    _last_contiguous(out, q, key_cache, value_cache, block_table)
    context_lens = context_lens.contiguous()
    cu = None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
    num_blocks, kv_heads, block_size, _ = value_cache.shape
    _call(
        "ll_attention",
        out.data_ptr(), q.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), block_table.data_ptr(),
        context_lens.data_ptr(), _pointer(cu),
        *out.stride()[:2], *q.stride()[:2], *_key_strides(key_cache), *value_cache.stride()[:3], block_table.stride(0),
        num_blocks, block_table.shape[1], q.shape[0], context_lens.shape[0], q.shape[1], kv_heads, block_size,
        q.shape[2], window, is_by_word(key_cache), _dtype(q), kv_type(key_cache.dtype, q.dtype),
        torch.get_num_threads(), _pointer(sinks), softmax_scale, softcap,
    )  # fmt: skip


def _write_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cos_sin: Tensor | None,
) -> None:
    _last_contiguous(q, k, v, key_cache, value_cache)
    positions, slot_mapping = positions.contiguous(), slot_mapping.contiguous()
    table = None if cos_sin is None else cos_sin.contiguous()
    num_blocks, kv_heads, block_size, _ = value_cache.shape
    max_pos, rotary = (0, 0) if table is None else table.shape
    _call(
        "ll_write_blocks",
        q.data_ptr(), k.data_ptr(), v.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(),
        key_cache.data_ptr(), value_cache.data_ptr(), _pointer(table),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *_key_strides(key_cache), *value_cache.stride()[:3],
        q.shape[0], q.shape[1], kv_heads, q.shape[2], num_blocks, block_size, max_pos, rotary,
        is_by_word(key_cache), _dtype(q), kv_type(key_cache.dtype, q.dtype), torch.get_num_threads(),
    )  # fmt: skip


def _copy_blocks(src: Tensor, dst: Tensor, src_ids: Tensor, dst_ids: Tensor) -> None:
    src_ids, dst_ids = src_ids.contiguous(), dst_ids.contiguous()
    _call(
        "ll_copy_blocks", src.data_ptr(), dst.data_ptr(), src_ids.data_ptr(), dst_ids.data_ptr(),
        src.stride(0), dst.stride(0), src.shape[0], dst.shape[0], src.shape[1], src_ids.shape[0],
        torch.get_num_threads(),
    )  # fmt: skip


def _rms_norm(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, summed: Tensor | None
) -> None:
    _last_contiguous(out, x, weight)
    rows, hidden = x.shape
    _call(
        "ll_rms_norm", out.data_ptr(), x.data_ptr(), weight.data_ptr(), _pointer(residual), _pointer(summed),
        rows, hidden, x.stride(0), 0 if residual is None else residual.stride(0), _dtype(x),
        int(weight.dtype == torch.float32), torch.get_num_threads(), eps,
    )  # fmt: skip


def _gate_mul(name: str, out: Tensor, x: Tensor) -> None:
    _last_contiguous(out, x)
    rows, width = x.shape
    _call(name, out.data_ptr(), x.data_ptr(), rows, width // 2, x.stride(0), _dtype(x), torch.get_num_threads())


def _route(weights: Tensor, experts: Tensor, scores: Tensor, renormalize: bool, round_weights: bool) -> None:
    how = (int(renormalize), int(round_weights), _dtype(scores))
    _call(
        "ll_route", weights.data_ptr(), experts.data_ptr(), scores.data_ptr(), *scores.shape, weights.shape[1], *how
    )  # fmt: skip


def _states(states: Tensor, block_table: Tensor) -> tuple[int, ...]:
    """Returns the strides of the states and the table, the number of states, and the width of the table."""
    if states.dtype != torch.float32 or states.stride(1) != 1:
        raise ValueError("states must be fp32 with contiguous rows")
    return states.stride(0), block_table.stride(0), states.shape[0], block_table.shape[1]


def _convolution(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    states: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
) -> None:
    _last_contiguous(out, x, weight, block_table)
    context_lens, cu_seqlens = context_lens.contiguous(), cu_seqlens.contiguous()
    _call(
        "ll_convolution", out.data_ptr(), x.data_ptr(), weight.data_ptr(), _pointer(bias), states.data_ptr(),
        block_table.data_ptr(), context_lens.data_ptr(), cu_seqlens.data_ptr(),
        out.stride(0), x.stride(0), *_states(states, block_table), context_lens.shape[0], x.shape[0], block_size,
        *weight.shape, int(silu), _dtype(x), torch.get_num_threads(),
    )  # fmt: skip


def _recurrence(
    out: Tensor,
    values: Tensor,
    keys: Tensor,
    queries: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    rates: Tensor | None,
    states: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
) -> None:
    _last_contiguous(block_table)
    context_lens, cu_seqlens = context_lens.contiguous(), cu_seqlens.contiguous()
    num_tokens, heads, width = values.shape
    _call(
        "ll_recurrence", out.data_ptr(), values.data_ptr(), keys.data_ptr(), queries.data_ptr(), decay.data_ptr(),
        _pointer(beta), _pointer(rates), states.data_ptr(),
        block_table.data_ptr(), context_lens.data_ptr(), cu_seqlens.data_ptr(),
        *_states(states, block_table), context_lens.shape[0], num_tokens, block_size,
        heads, *keys.shape[1:], width, torch.get_num_threads(),
    )  # fmt: skip


def _sample(
    out: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    sample_indices: Tensor,
    positions: Tensor,
) -> None:
    columns = (temperature, top_p, min_p, top_k, seeds, sample_indices, positions)
    _call(
        "ll_sample", out.data_ptr(), logits.data_ptr(), *(c.data_ptr() for c in columns),
        *logits.shape, logits.stride(0), torch.get_num_threads(),
    )  # fmt: skip


def _log_softmax_top(
    chosen: Tensor, rank: Tensor, top_ids: Tensor, top: Tensor, logits: Tensor, token_ids: Tensor
) -> None:
    _call(
        "ll_log_softmax_top", chosen.data_ptr(), rank.data_ptr(), top_ids.data_ptr(), top.data_ptr(),
        logits.data_ptr(), token_ids.data_ptr(), *logits.shape, logits.stride(0), top_ids.shape[1],
        torch.get_num_threads(),
    )  # fmt: skip


_OPERATORS: dict[str, tuple[str, Callable[..., None]]] = {
    "attention": (
        "(Tensor(a!) out, Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor context_lens, "
        "Tensor? cu_seqlens_q, float softmax_scale, int window, float softcap, Tensor? sinks) -> ()",
        _attention,
    ),
    "write_blocks": (
        "(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor slot_mapping, Tensor(b!) key_cache, "
        "Tensor(c!) value_cache, Tensor? cos_sin) -> ()",
        _write_blocks,
    ),
    "copy_blocks": ("(Tensor src, Tensor(a!) dst, Tensor src_ids, Tensor dst_ids) -> ()", _copy_blocks),
    "rms_norm": (
        "(Tensor(a!) out, Tensor x, Tensor weight, float eps, Tensor? residual, Tensor(b!)? summed) -> ()",
        _rms_norm,
    ),
    "silu_mul": ("(Tensor(a!) out, Tensor x) -> ()", functools.partial(_gate_mul, "ll_silu_mul")),
    "gelu_mul": ("(Tensor(a!) out, Tensor x) -> ()", functools.partial(_gate_mul, "ll_gelu_mul")),
    "softcap": (
        "(Tensor(a!) x, float cap) -> ()",
        lambda x, cap: _call("ll_softcap", x.data_ptr(), x.numel(), torch.get_num_threads(), cap),
    ),
    "route": (
        "(Tensor(a!) weights, Tensor(b!) experts, Tensor scores, bool renormalize, bool round_weights) -> ()",
        _route,
    ),
    "convolution": (
        "(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor(b!) states, Tensor block_table, "
        "Tensor context_lens, Tensor cu_seqlens, int block_size) -> ()",
        _convolution,
    ),
    "recurrence": (
        "(Tensor(a!) out, Tensor values, Tensor keys, Tensor queries, Tensor decay, Tensor? beta, Tensor? rates, "
        "Tensor(b!) states, Tensor block_table, Tensor context_lens, Tensor cu_seqlens, int block_size) -> ()",
        _recurrence,
    ),
    "sample": (
        "(Tensor(a!) out, Tensor logits, Tensor temperature, Tensor top_p, Tensor min_p, Tensor top_k, Tensor seeds, "
        "Tensor sample_indices, Tensor positions) -> ()",
        _sample,
    ),
    "log_softmax_top": (
        "(Tensor(a!) chosen, Tensor(b!) rank, Tensor(c!) top_ids, Tensor(d!) top, Tensor logits, "
        "Tensor token_ids) -> ()",
        _log_softmax_top,
    ),
}


@functools.cache
def register() -> torch.library.Library:
    """Defines the operators, once per process. They exist as long as the returned library exists."""
    library = torch.library.Library("looseleaf", "FRAGMENT")
    for name, (schema, function) in _OPERATORS.items():
        library.define(name + schema)
        library.impl(name, function, "CPU")
        library.impl(name, lambda *_: None, "Meta")
    return library
