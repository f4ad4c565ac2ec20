"""The ratios that `python -m bench.kernels` prints: the gain from the prefetch in decode attention, the gain from
shared blocks, and the cost of row invariance.

Each ratio divides the times of two alternatives, which run in turn in one process. Only the best time of each
alternative counts, which limits the effect of a busy machine. The ratio for row invariance is the time of our kernel,
which adds in a fixed order, divided by the time of a kernel of torch that may add in any order. Row invariance costs
nothing if this ratio is at most 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bench.kernel_works import BF16, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, paged_attention_work, paged_prefill_work
from kernels import cpu
from kernels.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class Ratio:
    name: str
    ratio: float


def ratio_of(ours: Callable[[], object], other: Callable[[], object], seconds: float) -> float:
    """Returns the best time of `ours` divided by the best time of `other`. The two run in turn, for about twice
    `seconds` in total and at least five times each.
    """
    best = [float("inf"), float("inf")]
    end = time.perf_counter() + 2 * seconds
    ours(), other()
    rounds = 0
    while time.perf_counter() < end or rounds < 5:
        rounds += 1
        for turn, call in enumerate((ours, other)):
            start = time.perf_counter()
            call()
            best[turn] = min(best[turn], time.perf_counter() - start)
    return best[0] / best[1]


def _prefetch(seconds: float) -> Iterator[Ratio]:
    switch = getattr(cpu.current().handle, "ll_attention_prefetch", None)
    if switch is None:  # the torch reference has no prefetch
        return
    for batch in (1, 8, 32):
        work = paged_attention_work(batch, 576)

        def without(call: Callable[[], object] = work.call) -> None:
            switch(0)
            call()
            switch(1)

        yield Ratio(f"prefetch on/off: time of {work.name}", ratio_of(work.call, without, seconds))


def _sharing(seconds: float) -> Iterator[Ratio]:
    """Yields the ratios for attention that reads a block only once if several sequences of a batch share it."""
    for batch in (4, 16):
        shared, apart = paged_attention_work(batch, 1024, shared=768), paged_attention_work(batch, 1024)
        name = f"768 keys of 1,024 shared, over none: time of {apart.name}"
        yield Ratio(name, ratio_of(shared.call, apart.call, seconds))


def _decode(seconds: float) -> Iterator[Ratio]:
    yield from _prefetch(seconds)
    yield from _sharing(seconds)
    batch, context = 8, 576
    work = paged_attention_work(batch, context)
    q = torch.randn(batch, HEADS, 1, HEAD_DIM).to(BF16)
    k, v = (torch.randn(batch, KV_HEADS, context, HEAD_DIM).to(BF16) for _ in range(2))
    free = ratio_of(work.call, lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), seconds)
    yield Ratio(f"price of row invariance: {work.name}, over SDPA bf16 on keys in one piece", free)


def _prefill(seconds: float) -> Iterator[Ratio]:
    for length in (512, 1024):
        work = paged_prefill_work(length, length)
        for dtype in (BF16, torch.float32):
            q, k, v = (torch.randn(1, heads, length, HEAD_DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))

            def free(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            name = f"price of row invariance: {work.name} bf16, over SDPA {str(dtype)[6:]} on keys in one piece"
            yield Ratio(name, ratio_of(work.call, free, seconds))


def _linear_price(rows: int, weight: torch.Tensor, seconds: float) -> Ratio:
    linear, x = PackedLinear(weight), torch.randn(rows, HIDDEN).to(weight.dtype)
    what = f"linear {rows} x {HIDDEN} x {len(weight)} {str(weight.dtype)[6:]} {linear.how}"
    price = ratio_of(lambda: linear(x), lambda: F.linear(x, weight), seconds)
    return Ratio(f"price of row invariance: {what}, over F.linear", price)


def _linear(seconds: float) -> Iterator[Ratio]:
    for dtype in (BF16, torch.float32):
        weight = torch.randn(2304, HIDDEN).to(dtype)
        for rows in (1, 8, 32, 512):
            yield _linear_price(rows, weight, seconds)


_RATIOS = {"paged_attention": _decode, "paged_prefill": _prefill, "linear": _linear}


def measure_ratios(kernel: str, seconds: float) -> list[Ratio]:
    """Returns the ratios of a kernel, or an empty list if none are defined for it. The two alternatives of a ratio run
    for about twice `seconds` in total.
    """
    return list(_RATIOS[kernel](seconds)) if kernel in _RATIOS else []
