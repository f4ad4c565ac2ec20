"""Measures the blocks saved by sharing between samples and beams (PagedAttention, figure 15), with real services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.paper.parts import Claim, Options, Section, table
from bench.served.cpu import last_line
from bench.served.sharing import DATA_SETS, WIDTHS
from loadtest.svg import axis_of, lines

LIMIT_S = 160
KINDS = {"n": "samples", "beams": "beams"}
ROOM = 5.0
"""The number of percentage points by which a saving may lie outside the paper's range."""


def measure(options: Options) -> dict[str, Any]:
    sizes = ("2", "1") if options.quick else ("8", "2")
    found = last_line(["bench.served.sharing", "--requests", sizes[0], "--handed-over", sizes[1]])
    return {**found, "requests": int(sizes[0])}


def section(result: Mapping[str, Any]) -> Section:
    rows, claims, series = [], [], {}
    for data in DATA_SETS:
        for kind, label in KINDS.items():
            saved = [result[data.name][f"{kind}_{width}"] for width in WIDTHS]
            name = f"{data.name}, {label}"
            rows.append([name, *(f"{value} %" for value in saved), f"{data.paper[kind]} %"])
            series[name] = list(zip(WIDTHS, saved, strict=True))
            low, high = map(float, data.paper[kind].split(" to "))
            holds = saved[0] >= low - ROOM and saved[-1] <= high + ROOM and saved == sorted(saved)
            means = f"{result[data.name]['mean_prompt']} and {result[data.name]['mean_output']}"
            why = (
                f"the model differs from OPT-13B, and a cell is the mean of {result['requests']} requests with drawn "
                f"lengths (means {means} tokens). Which of these causes the difference was not examined"
            )
            claims.append(Claim(
                f"blocks saved by 2 to 6 {label}, {data.name}", "PagedAttention, figure 15", f"{data.paper[kind]} %",
                f"{saved[0]} to {saved[-1]} %", holds, "" if holds else why,
            ))  # fmt: skip
    costs = result["hand_over"]
    described = (
        "`bench.served.sharing` serves the built-in model and reads the decode worker's block tables after every step. "
        "The table shows 1 - (different blocks / entries of all block tables), summed over all steps, for "
        f"{result['requests']} requests per cell. Lengths are drawn with the means of Alpaca and ShareGPT.\n\n"
        + table(["workload", *(str(width) for width in WIDTHS), "paper, 2 to 6"], rows)
        + "\n\nOne prefill and one ticket hand over all samples of a request. The ticket names blocks, so no KV is "
        "copied:\n\n" + table([key.replace("_", " ") for key in costs[0]], [list(row.values()) for row in costs])
    )
    values = [value for points in series.values() for _, value in points]
    plot = lines(
        "Blocks saved by sharing",
        axis_of("samples or beams", WIDTHS),
        axis_of("% of blocks", values, zero=True),
        series,
    )
    return Section("Sharing between samples and beams", described, claims, {"sharing.svg": plot})
