"""Compares preemption by swapping with preemption by recomputation, by block size (PagedAttention, figure 19), with
real services (`bench.served.preemption`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.paper.parts import Claim, Options, Section, table
from bench.served.cpu import last_line
from loadtest.svg import axis_of, lines

LIMIT_S = 420
BLOCK_SIZES = (8, 16, 32, 64, 128)
QUICK_BLOCK_SIZES = (16,)
SMALLEST_RATIO = 1.3
"""Swapping with the smallest blocks costs "much more" if it takes this many times as long as with the largest."""


def measure(options: Options) -> dict[str, Any]:
    sizes = QUICK_BLOCK_SIZES if options.quick else BLOCK_SIZES
    flags = ["--requests", "24" if options.quick else "64"]
    found = last_line(["bench.served.preemption", *flags, "--block-sizes", ",".join(map(str, sizes))])
    return {"requests": int(flags[1]), "rows": found["rows"]}


def section(result: Mapping[str, Any]) -> Section:
    by_mode = {
        mode: {r["block_size"]: r for r in result["rows"] if r["mode"] == mode} for mode in ("swap", "give-back")
    }
    sizes = sorted(by_mode["swap"])
    swap_ms = {size: by_mode["swap"][size]["ms_out"] + by_mode["swap"][size]["ms_in"] for size in sizes}
    slower = swap_ms[sizes[0]] / swap_ms[sizes[-1]]
    ratios = {size: by_mode["give-back"][size]["seconds"] / by_mode["swap"][size]["seconds"] for size in sizes}
    claims = [
        Claim(
            "swapping costs more with small blocks than with large ones", "PagedAttention, figure 19a",
            "much more", f"{slower:.2f} times, {sizes[0]} against {sizes[-1]} positions", slower >= SMALLEST_RATIO,
            "" if slower >= SMALLEST_RATIO else "blocks go to host memory of the same machine, not over PCIe, so small "
            "transfers cost little",
        ),
        Claim(
            "recomputation takes at most 1.2 times as long as swapping", "PagedAttention, section 7.3", "<= 1.2",
            f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}", max(ratios.values()) <= 1.2,
            "" if max(ratios.values()) <= 1.2 else "the ratio is that of whole runs. A copy to host memory is much "
            "cheaper on a CPU than to compute the same positions again",
        ),
    ]  # fmt: skip
    rows = [
        [
            size, round(swap_ms[size], 2), by_mode["swap"][size]["swaps"], by_mode["swap"][size]["ratio"],
            by_mode["give-back"][size]["given_back"], by_mode["give-back"][size]["ratio"],
        ]
        for size in sizes
    ]  # fmt: skip
    described = (
        f"`bench.served.preemption` sends {result['requests']} requests at once to the built-in model, first with room "
        "for all, then with 0.3 of the blocks that they used. Answers have the same tokens in all runs, otherwise the "
        "measurement fails. Milliseconds are those of a group, out and in together. Ratios are the time of all "
        "requests over the time with room for all.\n\n"
        + table(["block size", "swap, ms", "groups swapped", "ratio", "groups given back", "ratio"], rows)
    )
    series = {
        name: [(size, by_mode[mode][size]["ratio"]) for size in sizes]
        for name, mode in (("swap", "swap"), ("recomputation", "give-back"))
    }
    values = [value for points in series.values() for _, value in points]
    plot = lines(
        "Time with too few blocks, over the time with enough",
        axis_of("block size", sizes, log=True),
        axis_of("ratio", values, zero=True),
        series,
    )
    return Section("Preemption by swapping and by recomputation", described, claims, {"preemption.svg": plot})
