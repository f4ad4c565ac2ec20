"""The kernel calls that `bench.kernels` times, with their numbers of bytes and operations.

Shapes are those of a 125M model: 12 layers, 12 heads, 4 KV heads, head_dim 64, hidden 768.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.kv_cache import by_word
from kernels.linear import PackedLinear, Provider
from kernels.lora import LoraPart, LoraRows, LoraWeights, lora
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import rms_norm
from kernels.sampling import sample
from kernels.silu_mul import silu_mul
from kernels.write_blocks import write_blocks

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HIDDEN, VOCAB = 12, 12, 4, 64, 16, 768, 32_000
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Work:
    """A call to time, with its numbers of bytes and operations. `limit` is the name of the limit with which the call is
    compared.
    """

    name: str
    call: Callable[[], object]
    num_bytes: float
    flops: float
    limit: str  # "memory" or "compute"


def _arena(num_blocks: int, layers: int = LAYERS) -> Tensor:
    return torch.randn(num_blocks, layers, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(BF16)


def paged_attention_work(batch: int, context: int, shared: int = 0) -> Work:
    """Returns the attention of a decode step. Each call computes the next of twelve layers. Keys are stored by word, as
    the engine stores them. The first `shared` keys of all sequences are in the same blocks.
    """
    per_seq = context // BLOCK_SIZE
    arena = _arena(batch * per_seq)
    table = torch.randperm(batch * per_seq).int().view(batch, per_seq)
    table[:, : shared // BLOCK_SIZE] = table[0, : shared // BLOCK_SIZE]
    lens, q = torch.full((batch,), context, dtype=torch.int32), torch.randn(batch, HEADS, HEAD_DIM).to(BF16)
    layer = itertools.cycle(range(LAYERS))

    def call() -> Tensor:
        i = next(layer)
        return paged_attention(q, by_word(arena[:, i, 0]), arena[:, i, 1], table, lens, softmax_scale=0.125)

    num_bytes = batch * context * KV_HEADS * HEAD_DIM * 2 * 2
    flops = 4.0 * batch * context * HEADS * HEAD_DIM
    return Work(f"paged_attention batch {batch} context {context}", call, num_bytes, flops, "memory")


def paged_prefill_work(length: int, chunk: int) -> Work:
    """Returns the attention of a prompt in chunks. Each chunk attends to itself and to all earlier chunks."""
    arena, q = _arena(length // BLOCK_SIZE, 1), torch.randn(length, HEADS, HEAD_DIM).to(BF16)
    table = torch.randperm(length // BLOCK_SIZE).int()[None]
    ends = [(end, torch.tensor([end], dtype=torch.int32)) for end in range(chunk, length + 1, chunk)]
    starts = torch.tensor([0, chunk], dtype=torch.int32)

    def call() -> None:
        for end, lens in ends:
            where = (arena[:, 0, 0], arena[:, 0, 1], table, lens, starts)
            paged_prefill(q[end - chunk : end], *where, softmax_scale=0.125)

    flops = 2.0 * length * (length + 1) * HEADS * HEAD_DIM  # half of the square, because attention is causal
    name = f"paged_prefill length {length}" + (f" in chunks of {chunk}" if chunk < length else "")
    return Work(name, call, 0, flops, "compute")


def _write_blocks(tokens: int) -> Work:
    arena = _arena(tokens // BLOCK_SIZE + 1, 1)
    width = HEADS + 2 * KV_HEADS
    qkv = torch.randn(tokens, width, HEAD_DIM).to(BF16)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
    cos_sin, positions = torch.rand(2048, HEAD_DIM), torch.arange(tokens)
    caches = (arena[:, 0, 0], arena[:, 0, 1])
    num_bytes = 2 * 2 * tokens * width * HEAD_DIM
    return Work(
        f"write_blocks tokens {tokens}",
        lambda: write_blocks(q, k, v, positions, positions, *caches, cos_sin),
        num_bytes,
        0,
        "memory",
    )


def _copy_blocks(count: int) -> Work:
    block_bytes = LAYERS * 2 * KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2
    src, dst = (torch.zeros(count, block_bytes, dtype=torch.uint8) for _ in range(2))
    ids = (torch.randperm(count), torch.randperm(count))
    return Work(f"copy_blocks {count}", lambda: copy_blocks(src, dst, *ids), 2.0 * count * block_bytes, 0, "memory")


def _linears() -> list[Work]:
    """Returns linear layers for every provider on this CPU. If there is at most one provider, adds torch, but only with
    up to eight rows, because it may be slow.
    """
    have: list[Provider] = [p for p in ("amx", "onednn", "simd") if _packed(32, 32, p).how == p]
    works = []
    for rows in (1, 8, 32, 512):
        providers = have if len(have) > 1 or rows > 8 else [*have, "torch"]
        works += [_linear(rows, 2304, provider) for provider in providers]
    return works


def _packed(n_in: int, n_out: int, provider: Provider) -> PackedLinear:
    return PackedLinear(torch.randn(n_out, n_in).to(BF16), provider=provider)


def _linear(rows: int, n_out: int, provider: Provider) -> Work:
    """Returns a linear layer. Each call uses the next of twelve weight matrices."""
    layers = itertools.cycle([_packed(HIDDEN, n_out, provider) for _ in range(LAYERS)])
    x = torch.randn(rows, HIDDEN).to(BF16)
    limit = "memory" if rows <= 32 else "compute"
    flops, name = 2.0 * rows * HIDDEN * n_out, f"linear {rows} x {HIDDEN} x {n_out} {provider}"
    return Work(name, lambda: next(layers)(x), 2.0 * HIDDEN * n_out, flops, limit)


def _lora(rows: int, num_adapters: int, rank: int = 16) -> Work:
    """Returns the LoRA corrections of a product. Each call corrects the next of twelve products. The adapters are
    assigned to the rows in turn.
    """
    n_out = 2304
    sites = [
        LoraWeights(
            [[LoraPart(torch.randn(rank, HIDDEN).to(BF16), torch.randn(rank, n_out).to(BF16), 0, 1.0)]] * LAYERS
        )
        for _ in range(num_adapters)
    ]
    of_rows = LoraRows(sites, np.arange(rows, dtype=np.int32) % num_adapters)
    x, out, site = torch.randn(rows, HIDDEN).to(BF16), torch.randn(rows, n_out).to(BF16), itertools.cycle(range(LAYERS))
    flops, num_bytes = 2.0 * rows * rank * (HIDDEN + n_out), 2.0 * num_adapters * rank * (HIDDEN + n_out)
    name, limit = f"lora rows {rows} adapters {num_adapters} rank {rank}", "memory" if rows <= 32 else "compute"
    return Work(name, lambda: lora(x, out, of_rows, next(site)), num_bytes, flops, limit)


def _rms_norm(rows: int) -> Work:
    x, weight = torch.randn(rows, HIDDEN).to(BF16), torch.ones(HIDDEN).to(BF16)
    return Work(f"rms_norm rows {rows}", lambda: rms_norm(x, weight, 1e-5, x), 8.0 * rows * HIDDEN, 0, "memory")


def _silu_mul(rows: int) -> Work:
    x = torch.randn(rows, 2 * 2048).to(BF16)
    return Work(f"silu_mul rows {rows}", lambda: silu_mul(x), 6.0 * rows * 2048, 0, "memory")


def _sampling(kind: str, n: int) -> Work:
    logits = torch.randn(n, VOCAB)
    heat, k, p = {"greedy": (0.0, 0, 1.0), "plain": (1.0, 0, 1.0), "top_k_p": (0.8, 50, 0.9)}[kind]
    columns = ([heat] * n, [k] * n, [p] * n, [0.0] * n, [1] * n, [0] * n, [2] * n)
    return Work(f"sampling {kind} batch {n}", lambda: sample(logits, *columns), 4.0 * n * VOCAB, 0, "memory")


CASES: dict[str, Callable[[], list[Work]]] = {
    "paged_attention": lambda: list(
        itertools.starmap(paged_attention_work, [(1, 576), (8, 576), (32, 576), (8, 2048), (1, 8192)])
    ),
    "paged_prefill": lambda: list(
        itertools.starmap(paged_prefill_work, [(512, 512), (1024, 1024), (4096, 4096), (4096, 512)])
    ),
    "write_blocks": lambda: [_write_blocks(32), _write_blocks(1024)],
    "copy_blocks": lambda: [_copy_blocks(8), _copy_blocks(256)],
    "linear": _linears,
    "lora": lambda: [_lora(1, 1), _lora(32, 1), _lora(32, 8), _lora(512, 8)],
    "rms_norm": lambda: [_rms_norm(32), _rms_norm(1024)],
    "silu_mul": lambda: [_silu_mul(32), _silu_mul(1024)],
    "sampling": lambda: [_sampling(kind, n) for kind in ("greedy", "plain", "top_k_p") for n in (1, 32)],
}
