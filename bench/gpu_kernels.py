"""Compares the GPU kernels with the measured limits of this device (`python -m bench.gpu_kernels`).

The limits are measured in the same run: memory with a copy of 4 GiB (bytes read and written) and with a sum over 4 GiB
(bytes read), of which the higher rate counts, arithmetic with an 8192 x 8192 x 8192 bf16 matrix product. Shapes are
those of Llama-3-8B: 32 layers, 32 query heads, 8 KV heads of 128, blocks of 16. Calls cycle through the layers, so keys
and values come from memory and not from the L2 cache. Calls are replayed from one CUDA graph, except those of prefill
and of attention providers without graph capture. `--rehearse` runs every case at a toy size on the CPU under Triton's
interpreter. It runs the same code, but its figures have no meaning. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from kernels.providers.base import AttentionBatch, AttentionProvider, AttentionSpec, HostBatch, Unavailable
from kernels.providers.choice import ProviderName, open_provider

BF16 = torch.bfloat16
LEAST_CALLS = 8
"""The minimum number of calls in a graph."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape and the sizes of the cases."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    hidden: int = 4096
    intermediate: int = 14336
    vocab: int = 128_256
    batches: tuple[int, ...] = (1, 16, 64, 256)
    contexts: tuple[int, ...] = (512, 4096, 32_768)
    prefills: tuple[tuple[int, int, int], ...] = ((1, 2048, 6144), (1, 8192, 8192), (16, 512, 512))
    """Prefill batches: (number of sequences, queries per sequence, context per sequence)."""
    skewed: tuple[int, int, int] = (63, 512, 131_072)
    """A decode step with one long context among short contexts: (short sequences, their context, the long context)."""
    copies: tuple[int, ...] = (1, 8, 64, 512)
    rows: tuple[int, ...] = (1, 64, 2048)
    pool_bytes: int = 24 << 30
    most_keys: int = 1 << 21
    """The maximum number of keys of all sequences of a decode step: 8 GiB of keys and values per layer."""

    @property
    def kv_bytes(self) -> int:
        """The number of bytes of one layer's keys and values in one block."""
        return 2 * self.kv_heads * self.block_size * self.head_dim * 2


TOY = Shape(
    2, 4, 2, 64, 16, 64, 96, 128, (1, 2), (17, 40), ((1, 5, 21), (2, 3, 3)), (2, 5, 300), (2,), (3,), 1 << 20
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A set of calls that are timed in turn, with the bytes and operations of each call. `limit` is the name of the
    limit that applies.
    """

    kernel: str
    provider: str
    size: str
    calls: Sequence[Callable[[], object]]
    num_bytes: float
    flops: float = 0.0
    limit: str = "memory"
    capturable: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    kernel: str
    provider: str
    size: str
    us: float
    rate: float  # GB/s or TFLOP/s
    unit: str
    share: float  # of the limit
    how: str  # "graph", "events" or "clock"


class Bench:
    """A benchmark of one device. It times cases and measures the device's limits."""

    def __init__(self, device: torch.device, shape: Shape) -> None:
        self.device, self.shape = device, shape
        self.generator = torch.Generator(device).manual_seed(1)
        self.ceilings = {"memory": max(self._copy_rate(), self._read_rate()), "compute": self._product_rate()}

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=BF16, generator=self.generator)

    def integers(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, device=self.device, generator=self.generator)

    def permutation(self, size: int) -> Tensor:
        return torch.randperm(size, device=self.device, generator=self.generator)

    def timed(self, calls: Sequence[Callable[[], object]], capturable: bool) -> tuple[float, str]:
        """Returns the median duration of one call in seconds, and the method of measurement."""
        for call in calls:
            call()
        if self.device.type != "cuda":
            return self._clock(calls), "clock"
        calls = [*calls] * -(-LEAST_CALLS // len(calls))  # so that the launch of a graph takes little of the time
        replay, how = self._captured(calls) if capturable else (None, "events")
        if replay is None:
            return self._events(lambda: [call() for call in calls]) / len(calls), how
        return self._events(replay) / len(calls), how

    def run(self, case: Case) -> Result:
        seconds, how = self.timed(case.calls, case.capturable)
        amount, unit = (case.num_bytes / 1e9, "GB/s") if case.limit == "memory" else (case.flops / 1e12, "TFLOP/s")
        rate = amount / seconds
        share = rate / self.ceilings[case.limit]
        return Result(case.kernel, case.provider, case.size, seconds * 1e6, rate, unit, share, how)

    # --- internal methods

    def _clock(self, calls: Sequence[Callable[[], object]]) -> float:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)

    def _captured(self, calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object] | None, str]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
        except RuntimeError as error:
            torch.cuda.synchronize()
            return None, f"events (not captured: {str(error).splitlines()[0][:60]})"
        return graph.replay, "graph"

    def _events(self, call: Callable[[], object], seconds: float = 0.2) -> float:
        """Returns the median time of a call in seconds, measured with CUDA events. Repeats the call for at least
        `seconds`, and at least five times.
        """
        times: list[float] = []
        end = time.perf_counter() + seconds
        call()
        while time.perf_counter() < end or len(times) < 5:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        return statistics.median(times)

    def _copy_rate(self) -> float:
        """Returns the bandwidth of a copy in GB/s, which counts bytes read and bytes written."""
        size = 4 << 30 if self.device.type == "cuda" else 1 << 22
        source = torch.randint(255, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        seconds, _ = self.timed([lambda: target.copy_(source)], True)
        return 2 * size / seconds / 1e9

    def _read_rate(self) -> float:
        """Returns the bandwidth of a reduction in GB/s, which counts bytes read."""
        size = 1 << 30 if self.device.type == "cuda" else 1 << 20
        source = torch.randn(size, device=self.device)
        seconds, _ = self.timed([source.sum], True)
        return 4 * size / seconds / 1e9

    def _product_rate(self) -> float:
        """Returns the speed of a bf16 matrix product of random data, in TFLOP/s."""
        n = 8192 if self.device.type == "cuda" else 128
        a, b = (torch.randn(n, n, device=self.device, dtype=BF16) for _ in range(2))
        seconds, _ = self.timed([lambda: a @ b], True)
        return 2 * n**3 / seconds / 1e12


# --- attention


def caches(bench: Bench, num_blocks: int) -> list[tuple[Tensor, Tensor]]:
    """Returns (keys, values) of each layer, for as many layers as fit into the pool. Both are views [num_blocks,
    kv_heads, block_size, head_dim].
    """
    shape = bench.shape
    layers = max(1, min(shape.layers, shape.pool_bytes // (num_blocks * shape.kv_bytes)))
    pool = bench.randn(num_blocks, layers, 2, shape.kv_heads, shape.block_size, shape.head_dim)
    return [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(layers)]


def batch_of(bench: Bench, q_len: int, contexts: Sequence[int]) -> tuple[AttentionBatch, int]:
    """Returns a batch of sequences over blocks in random order, and the number of these blocks."""
    num_blocks = [-(-context // bench.shape.block_size) for context in contexts]
    blocks = bench.permutation(sum(num_blocks)).int().cpu().numpy()
    table = np.zeros((len(contexts), max(num_blocks)), np.int32)
    table[np.arange(table.shape[1]) < np.array(num_blocks)[:, None]] = blocks
    starts = np.arange(0, (len(contexts) + 1) * q_len, q_len, dtype=np.int32)
    host = HostBatch(starts, np.array(contexts, np.int32), table)
    on_device = [torch.from_numpy(array).to(bench.device) for array in (starts, host.context_lens, table)]
    return AttentionBatch(*on_device, host, decode_only=q_len == 1, is_static=q_len == 1), sum(num_blocks)


def spec_of(bench: Bench, *, deterministic: bool, max_model_len: int) -> AttentionSpec:
    shape, on_gpu = bench.shape, bench.device.type == "cuda"
    return AttentionSpec(
        bench.device, torch.cuda.get_device_capability(bench.device) if on_gpu else None, shape.heads, shape.kv_heads,
        shape.head_dim, shape.block_size, BF16, BF16, shape.head_dim**-0.5, None, max_model_len, deterministic,
    )  # fmt: skip


def names_of(bench: Bench, library: str | None) -> list[tuple[ProviderName, bool]]:
    """Returns (provider, deterministic) for every provider that is available on this machine. Prints the reason for
    each provider that is not available.
    """
    found: list[tuple[ProviderName, bool]] = []
    for name in get_args(ProviderName):
        try:
            open_provider(name, spec_of(bench, deterministic=False, max_model_len=1), library)
            found.append((name, False))
        except Unavailable as why:
            print(f"without {name}: {why}", file=sys.stderr)
    return [*found, ("triton", True)] if ("triton", False) in found else found


def attention_cases(bench: Bench, library: str | None) -> Iterable[Case]:
    shape, names = bench.shape, names_of(bench, library)
    pairs = itertools.product(shape.batches, shape.contexts)
    sizes = [(num_seqs, 1, context) for num_seqs, context in pairs if num_seqs * context <= shape.most_keys]
    batches = [(q_len, [context] * num_seqs) for num_seqs, q_len, context in [*sizes, *shape.prefills]]
    num_short, short, context = shape.skewed
    for q_len, contexts in [*batches, (1, [context] + [short] * num_short)]:
        yield from _attention_cases_of(bench, library, names, q_len, contexts)


def _attention_cases_of(
    bench: Bench, library: str | None, names: list[tuple[ProviderName, bool]], q_len: int, contexts: Sequence[int]
) -> Iterable[Case]:
    """Yields the cases of one size. Its memory is free again when they have run."""
    batch, num_blocks = batch_of(bench, q_len, contexts)
    layers, context = caches(bench, num_blocks), batch.max_context_len
    q = bench.randn(len(contexts) * q_len, bench.shape.heads, bench.shape.head_dim)
    for name, deterministic in names:
        provider = open_provider(name, spec_of(bench, deterministic=deterministic, max_model_len=context), library)
        yield _attention(bench, provider, q, layers, batch)


def _attention(
    bench: Bench, provider: AttentionProvider, q: Tensor, layers: Sequence[tuple[Tensor, Tensor]], batch: AttentionBatch
) -> Case:
    shape, num_seqs = bench.shape, batch.context_lens.shape[0]
    q_len, contexts = batch.max_q_len, batch.host.context_lens.astype(float)
    provider.prepare(batch)
    attend = provider.decode if batch.decode_only else provider.prefill
    calls = [lambda kv=kv: attend(q, *kv, batch) for kv in layers]
    pairs = (q_len * contexts - q_len * (q_len - 1) // 2).sum()  # (query, visible key)
    num_bytes = 2.0 * contexts.sum() * shape.kv_heads * shape.head_dim * 2
    flops = 4.0 * pairs * shape.heads * shape.head_dim
    shortest, context = int(contexts.min()), str(batch.max_context_len)
    context = context if int(context) == shortest else f"{shortest}, one {context}"
    who = f"{provider.name}, deterministic" if provider.deterministic and provider.name == "triton" else provider.name
    if batch.decode_only:
        return Case("decode", who, f"{num_seqs} x {context}", calls, num_bytes, flops, "memory", provider.capturable)
    return Case("prefill", who, f"{num_seqs} x {q_len} of {context}", calls, num_bytes, flops, "compute", False)


# --- the rest of a layer


def layer_cases(bench: Bench) -> Iterable[Case]:
    from kernels.gpu.linear import linear
    from kernels.gpu.rms_norm import rms_norm
    from kernels.gpu.silu_mul import silu_mul

    shape = bench.shape
    weights = [bench.randn(shape.hidden, shape.hidden) for _ in range(8)]
    gain = bench.randn(shape.hidden)
    for rows in shape.rows:
        x, gated = bench.randn(rows, shape.hidden), bench.randn(rows, 2 * shape.intermediate)
        limit = "memory" if rows <= 256 else "compute"
        num_bytes, flops = 2.0 * shape.hidden**2, 2.0 * rows * shape.hidden**2
        fixed = [lambda w=w, x=x: linear(x, w) for w in weights]
        free = [lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights]
        yield Case("linear", "triton, deterministic", f"{rows} rows", fixed, num_bytes, flops, limit)
        yield Case("linear", "cublas", f"{rows} rows", free, num_bytes, flops, limit)
        norm = [lambda x=x: rms_norm(x, gain, 1e-5)]
        yield Case("rms_norm", "triton", f"{rows} rows", norm, 4.0 * x.numel())
        yield Case("silu_mul", "triton", f"{rows} rows", [lambda g=gated: silu_mul(g)], 3.0 * gated.numel())


def block_cases(bench: Bench) -> Iterable[Case]:
    from kernels.gpu.copy_blocks import copy_blocks
    from kernels.gpu.write_blocks import write_blocks

    shape = bench.shape
    block_bytes = shape.kv_bytes * shape.layers
    for count in shape.copies:
        arena = torch.empty(2 * count, block_bytes, dtype=torch.uint8, device=bench.device)
        ids = bench.permutation(2 * count)
        call = [lambda a=arena, i=ids, n=count: copy_blocks(a, a, i[:n], i[n:])]
        yield Case("copy_blocks", "triton", f"{count} x {block_bytes / 2**20:.1f} MiB", call, 2.0 * count * block_bytes)
    for rows in shape.rows:
        keys, values = caches(bench, -(-rows // shape.block_size))[0]
        qkv = bench.randn(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
        angles = torch.rand(rows, shape.head_dim, device=bench.device)
        at = torch.arange(rows, device=bench.device)
        call = [lambda q=q, k=k, v=v, at=at, c=(keys, values), a=angles: write_blocks(q, k, v, at, at, *c, a)]
        yield Case("write_blocks", "triton", f"{rows} tokens", call, 4.0 * qkv.numel())


def sampling_cases(bench: Bench) -> Iterable[Case]:
    from kernels.gpu.sampling import sample

    rows = bench.shape.batches[-2]
    logits = torch.randn(rows, bench.shape.vocab, device=bench.device, generator=bench.generator)

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=bench.device)

    for name, heat, k, p in (("greedy", 0.0, 0, 1.0), ("plain", 1.0, 0, 1.0), ("top k and p", 0.8, 50, 0.9)):
        whole = [column(value, torch.int64) for value in (k, 1, 0, 2)]
        real = [column(value) for value in (heat, p, 0.0)]
        call = [lambda r=real, w=whole: sample(logits, r[0], w[0], r[1], r[2], w[1], w[2], w[3])]
        yield Case("sampling", "triton", f"{name}, {rows} rows", call, 4.0 * logits.numel())


CASES: dict[str, Callable[[Bench, str | None], Iterable[Case]]] = {
    "attention": attention_cases,
    "layer": lambda bench, library: layer_cases(bench),
    "blocks": lambda bench, library: block_cases(bench),
    "sampling": lambda bench, library: sampling_cases(bench),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_kernels", description=__doc__)
    parser.add_argument("--only", choices=sorted(CASES), nargs="+", default=list(CASES))
    parser.add_argument("--attention-library", help="a file with FlashAttention-3's operators")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU, TRITON_INTERPRET=1")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("bench.gpu_kernels: no GPU here; --rehearse runs the cases at a toy size on the CPU")
    bench = Bench(torch.device("cpu" if options.rehearse else "cuda"), TOY if options.rehearse else Shape())
    print(f"copy {bench.ceilings['memory']:.0f} GB/s, bf16 product {bench.ceilings['compute']:.0f} TFLOP/s", flush=True)
    results: list[Result] = []
    with torch.inference_mode():
        for group in options.only:
            for case in CASES[group](bench, options.attention_library):
                result = bench.run(case)
                del case  # the next case may need its memory
                results.append(result)
                what = f"{result.kernel:13} {result.provider:22} {result.size:22}"
                print(
                    f"{what} {result.us:10.1f} us {result.rate:8.1f} {result.unit:8} {result.share:6.1%}  {result.how}",
                    flush=True,
                )
    print(json.dumps({
        "bench": "kernels.gpu", "device": torch.cuda.get_device_name() if bench.device.type == "cuda" else "rehearsal",
        "ceilings": bench.ceilings, "results": [asdict(result) for result in results],
    }))  # fmt: skip


if __name__ == "__main__":
    main()
