"""Implements `paged_attention` and `paged_prefill` with the kernels in `attention_kernels`. Checks shapes, chooses
tiles and launches the kernels.

Nothing is read back from the device, so a call can be captured in a CUDA graph. Values are therefore not checked:
invalid block tables, lengths or `cu_seqlens_q` cause accesses outside the tensors. The caches are not written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.gpu import attention_tiles as tiles
from kernels.gpu.attention_kernels import attention_kernel, merge_kernel
from kernels.gpu.attention_tiles import Chip, Tiling

INTERPRETED = not isinstance(attention_kernel, triton.JITFunction)
E4M3 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Attention:
    """The arguments of one call, and the sizes that follow from their shapes."""

    out: Tensor
    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor | None
    softmax_scale: float
    window: int | None
    deterministic: bool
    k_scale: float
    v_scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.key_cache.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.num_kv_heads

    @property
    def fp8(self) -> bool:
        return self.key_cache.dtype == E4M3

    @property
    def max_keys(self) -> int:
        return self.block_table.shape[1] * self.key_cache.shape[2]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _check(a: Attention) -> None:
    k, v = a.key_cache, a.value_cache
    _require(a.q.dim() == 3 and k.dim() == 4, "q must be [rows, heads, head_dim], caches [blocks, heads, slots, d]")
    _require(k.shape == v.shape and k.stride() == v.stride(), "key_cache and value_cache differ in shape or strides")
    _require(a.q.dtype in DTYPES, f"q has dtype {a.q.dtype}, which is none of {DTYPES}")
    _require(k.dtype == v.dtype and k.dtype in (a.q.dtype, E4M3), "the caches' dtype must be q's or float8_e4m3fn")
    _require(a.head_dim == k.shape[3] and a.head_dim % 8 == 0, "head_dim must match and be a multiple of 8")
    _require(a.head_dim <= tiles.MAX_HEAD_DIM, f"head_dim {a.head_dim} is above {tiles.MAX_HEAD_DIM}")
    _require(k.shape[1] > 0 and a.q.shape[1] % k.shape[1] == 0, "num_heads must be a multiple of kv heads")
    _require(a.out.shape == a.q.shape and a.out.dtype == a.q.dtype, "out must be like q")
    _require(all(x.stride(-1) == 1 for x in (a.q, a.out, k, v)), "the last dimension must be contiguous")
    _check_batch(a)


def _check_batch(a: Attention) -> None:
    _require(a.block_table.dtype == a.context_lens.dtype == torch.int32, "block_table and context_lens must be int32")
    _require(a.block_table.dim() == 2 and a.block_table.shape[0] == a.num_seqs, "one block table row per sequence")
    _require(a.softmax_scale > 0 and a.k_scale > 0 and a.v_scale > 0, "scales must be positive")
    _require(a.window is None or a.window > 0, "window must be positive")
    _require(a.softcap is None or a.softcap > 0, "softcap must be positive")
    if a.sinks is not None:
        fits = a.sinks.dtype == torch.float32 and a.sinks.shape == a.q.shape[1:2] and a.sinks.is_contiguous()
        _require(fits, "sinks must be fp32 [num_heads]")
    if a.cu_seqlens_q is None:
        _require(a.q.shape[0] == a.num_seqs, "decode takes one query per sequence")
    else:
        fits = a.cu_seqlens_q.dtype == torch.int32 and a.cu_seqlens_q.shape == (a.num_seqs + 1,)
        _require(fits, "cu_seqlens_q must be int32 [num_seqs + 1]")


def chip_of(device: torch.device) -> Chip:
    """Returns the device's chip. For the interpreter, returns a small chip, which small tests can fill."""
    if INTERPRETED:
        return Chip(90, 4)
    _require(
        device.type == "cuda", f"tensors on {device}: these kernels need CUDA, or TRITON_INTERPRET=1 before import"
    )
    found = torch.cuda.get_device_properties(device)
    return Chip(10 * found.major + found.minor, found.multi_processor_count)


def plan(a: Attention, chip: Chip, max_q_len: int | None) -> tuple[Tiling, int]:
    """Returns the tiling of a call and the number of parts into which its keys are split."""
    shape = (a.head_dim, a.group, a.fp8)
    varlen = a.cu_seqlens_q is not None
    fp32 = tiles.fp32_tiling(*shape[:2]) if a.q.dtype == torch.float32 and not INTERPRETED else None
    if a.deterministic:
        pieces = 1 if varlen else tiles.num_pieces(a.max_keys, a.window)
        return fp32 or tiles.deterministic_tiling(*shape, chip), pieces
    if varlen:
        return fp32 or tiles.prefill_tiling(*shape, chip, max_q_len), 1
    tiling = fp32 or tiles.decode_tiling(*shape)
    return tiling, tiles.num_splits(tiling, a.num_seqs * a.num_kv_heads, a.max_keys, chip)


def launch(a: Attention, tiling: Tiling, splits: int) -> Tensor:
    """Runs the kernel and, if keys are split, the merge. Does not check shapes."""
    partial_acc = partial_max = partial_sum = None
    if splits > 1:
        sums = (a.num_seqs, a.q.shape[1], splits)
        partial_acc = torch.empty((*sums, a.head_dim), dtype=torch.float32, device=a.q.device)
        partial_max, partial_sum = torch.empty((2, *sums), dtype=torch.float32, device=a.q.device)
    span = {
        "HEAD_DIM": a.head_dim,
        "WIDTH": tiles.width_of(a.head_dim),
        "TILE": tiling.tile,
        "PIECE": tiles.PIECE if a.deterministic else 0,
        "WINDOWED": a.window is not None,
        "SINKS": a.sinks is not None,
        "enable_fp_fusion": not a.deterministic,
    }
    varlen = a.cu_seqlens_q is not None
    programs = a.q.shape[0] // (tiling.rows // a.group) + a.num_seqs if varlen else a.num_seqs
    attention_kernel[(programs, a.num_kv_heads, splits)](
        a.out, a.q, a.key_cache, a.value_cache, a.block_table, a.context_lens, a.cu_seqlens_q,
        partial_acc, partial_max, partial_sum, a.sinks,
        a.softmax_scale * a.k_scale * math.log2(math.e), (a.softcap or 0.0) * math.log2(math.e), a.v_scale,
        a.num_seqs, splits, a.window or 0,
        *a.q.stride()[:2], *a.out.stride()[:2], a.block_table.stride(0), *a.key_cache.stride()[:3],
        GROUP=a.group, BLOCK_SIZE=a.key_cache.shape[2], ROWS=tiling.rows, VARLEN=varlen, DIRECT=splits == 1,
        CAPPED=a.softcap is not None, WIDE=INTERPRETED, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        **span,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(a.num_seqs, a.q.shape[1])](
            a.out, a.context_lens, partial_acc, partial_max, partial_sum, a.sinks, a.v_scale, splits, a.window or 0,
            *a.out.stride()[:2], SPLITS=1 if a.deterministic else tiles.power_of_2(splits), num_warps=4, **span,
        )  # fmt: skip
    return a.out


def _out_like(q: Tensor) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _run(a: Attention, max_q_len: int | None = None) -> Tensor:
    _check(a)
    chip = chip_of(a.q.device)
    _require(not a.fp8 or chip.cc >= 89, f"compute capability {chip.cc / 10} has no conversion from float8_e4m3fn")
    if not a.q.shape[0] or not a.num_seqs:
        return a.out
    return launch(a, *plan(a, chip, max_q_len))


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    softmax_scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    deterministic: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Implements the contract of `kernels.paged_attention.paged_attention`, for bf16, fp16 and (slowly) fp32.

    key_cache, value_cache: also float8_e4m3fn; their values are multiplied by `k_scale` and `v_scale`. Both must have
        the same strides, as views of one arena do.
    deterministic: a row's bits depend only on its own query, keys and values, and equal those of `paged_prefill` in
        this mode. Uses up to 4 (head_dim + 2) bytes of memory for each sequence, head and 512 keys of a block table
        row's capacity.
    """
    where = (key_cache, value_cache, block_table, context_lens, None)
    options = (softmax_scale, window, deterministic, k_scale, v_scale, softcap, sinks)
    return _run(Attention(_out_like(q) if out is None else out, q, *where, *options))


def paged_prefill(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    softmax_scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    max_q_len: int | None = None,
    deterministic: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Implements the contract of `kernels.paged_prefill.paged_prefill`. For dtypes, strides and `deterministic`, see
    `paged_attention`.

    max_q_len: upper bound of the length of a chunk (not checked), which allows smaller tiles for short chunks. Rows of
    q and out at index cu_seqlens_q[num_seqs] or above are neither read nor written.
    """
    where = (key_cache, value_cache, block_table, context_lens, cu_seqlens_q)
    options = (softmax_scale, window, deterministic, k_scale, v_scale, softcap, sinks)
    return _run(Attention(_out_like(q) if out is None else out, q, *where, *options), max_q_len)
