"""Measures kernels: their times, GB/s or TFLOP/s, and the share of this machine's limit that they reach
(`python -m bench.kernels KERNEL|all`).

The last line is JSON: `cases` with the share of each, and `ratios` (see `bench.kernel_ratios`). Limits are measured
at the start and after every case, and the highest value counts: memory by reading 256 MB, arithmetic by the faster of a
packed bf16 product and torch's fp32 product. A share is meaningful only on a quiet machine (see `load`) and for data
larger than the caches. A share above 1 suggests that one of these two conditions was not met. `bench.kernel_works`
defines the calls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from bench.kernel_ratios import measure_ratios
from bench.kernel_works import BF16, CASES, Work
from kernels import cpu
from kernels.linear import PackedLinear


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    isa: str
    threads: int
    best_ms: float
    median_ms: float
    rate: float  # GB/s or TFLOP/s, of the best time
    unit: str
    limit: float
    share: float
    load: float  # runnable processes per core over the last minute; above about 1, the share is not reliable


def timed(call: Callable[[], object], seconds: float) -> list[float]:
    """Repeats the call for `seconds`, and at least five times, after three calls to warm up. Returns the duration of
    each call in seconds.
    """
    for _ in range(3):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def memory_limit(seconds: float) -> float:
    """Returns the highest bandwidth of reading 256 MB, in GB/s."""
    big = torch.ones(64 << 20)
    return big.numel() * 4 / min(timed(big.sum, seconds)) / 1e9


def compute_limit(seconds: float) -> float:
    """Returns the highest speed of a 512 x 1024 x 1024 matrix product in TFLOP/s. Measures fp32 and, if bf16 weights
    are packed, also bf16.
    """
    a, b = torch.randn(512, 1024), torch.randn(1024, 1024)
    linear, x = PackedLinear(b.to(BF16)), a.to(BF16)
    times = timed(lambda: a @ b, seconds / 2)
    if linear.is_packed:
        times += timed(lambda: linear(x), seconds / 2)
    return 2 * 512 * 1024 * 1024 / min(times) / 1e12


def raise_limits(limits: dict[str, float], seconds: float) -> None:
    """Measures the limits again, and raises the limits that were too low. Other processes can only lower a measurement,
    so the highest measurement is closest to the machine's limit.
    """
    limits["memory"] = max(limits.get("memory", 0.0), memory_limit(seconds))
    limits["compute"] = max(limits.get("compute", 0.0), compute_limit(seconds))


def measure(work: Work, seconds: float, limits: dict[str, float]) -> Result:
    """Returns the result of a case without its limit and share, which `with_share` fills in when all limits are
    known.
    """
    times = timed(work.call, seconds)
    raise_limits(limits, seconds / 4)
    amount, unit = (work.num_bytes / 1e9, "GB/s") if work.limit == "memory" else (work.flops / 1e12, "TFLOP/s")
    ms = min(times) * 1e3, statistics.median(times) * 1e3
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return Result(work.name, cpu.current().isa, torch.get_num_threads(), *ms, amount / min(times), unit, 0.0, 0.0, load)


def with_share(result: Result, limit: float) -> Result:
    return replace(result, limit=limit, share=result.rate / limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=[*sorted(CASES), "all"])
    parser.add_argument("--isa", choices=cpu.ISAS, default=None, help="default: the best this CPU has")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    options = parser.parse_args()
    cpu.load(options.isa)
    torch.set_num_threads(options.threads)
    limits: dict[str, float] = {}
    raise_limits(limits, options.seconds / 2)
    results, kinds = list[Result](), list[str]()
    chosen = sorted(CASES) if options.kernel == "all" else [options.kernel]
    for name in chosen:
        for work in CASES[name]():
            results.append(measure(work, options.seconds, limits))
            kinds.append(work.limit)
    results = [with_share(r, limits[kind]) for r, kind in zip(results, kinds, strict=True)]
    for r in results:
        rate = f"{r.rate:8.2f} {r.unit} = {r.share:.0%} of {r.limit:.2f}"
        doubt = f"  (load {r.load:.1f} per core: do not trust the share)" if r.load > 1 or r.share > 1 else ""
        print(
            f"{r.name:40s} {r.isa} x{r.threads}  best {r.best_ms:8.3f} ms  median {r.median_ms:8.3f} ms  {rate}{doubt}"
        )
    ratios = [ratio for name in chosen for ratio in measure_ratios(name, options.seconds)]
    for ratio in ratios:
        print(f"{ratio.name:90s} {ratio.ratio:.2f}")
    print(json.dumps({"cases": [asdict(r) for r in results], "ratios": [asdict(r) for r in ratios]}))


if __name__ == "__main__":
    main()
