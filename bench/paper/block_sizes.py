"""Measures the time of a decode step by block size (PagedAttention, figure 18a), and the time that its bytes take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.engine import MODEL, bytes_per_s, decode
from bench.paper.memory import BLOCK_SIZES
from bench.paper.parts import Claim, Options, Section, table
from engine.model_runner import ModelRunner, RunnerSettings
from loadtest.svg import axis_of, lines

LIMIT_S = 80
BATCH, CONTEXT, STEPS = 16, 1024, 12
QUICK_BLOCK_SIZES, QUICK_CONTEXT, QUICK_STEPS = (4, 256), 64, 2
CHEAP = 1.1
"""Block sizes count as equally fast if their times differ by at most this factor."""


def measure(options: Options) -> dict[str, Any]:
    sizes = QUICK_BLOCK_SIZES if options.quick else BLOCK_SIZES
    context, steps = (QUICK_CONTEXT, QUICK_STEPS) if options.quick else (CONTEXT, STEPS)
    rows, rate = [], 0.0
    for size in sizes:
        settings = RunnerSettings(str(MODEL), load_format="dummy", max_model_len=CONTEXT, block_size=size)
        runner = ModelRunner(settings)
        rate = rate or bytes_per_s(runner)
        found = decode(runner, BATCH, context, steps, rate)
        rows.append({"block_size": size, "ms": found["ms"], "floor_ms": found["floor_ms"]})
    return {"batch": BATCH, "context": context, "gb_per_s": round(rate / 1e9, 1), "rows": rows}


def section(result: Mapping[str, Any]) -> Section:
    rows = result["rows"]
    best = min(rows, key=lambda row: row["ms"])
    small, usual = rows[0], [row for row in rows if 16 <= row["block_size"] <= 128] or rows
    slower = small["ms"] / best["ms"]
    spread = max(row["ms"] for row in usual) / min(row["ms"] for row in usual)
    even = "attention on this CPU reads a block's keys as rows of one head, whatever the size of the block"
    claims = [
        Claim(
            "a step with very small blocks is slower", "PagedAttention, section 7.2", "slower",
            f"{slower:.2f} times the fastest ({small['block_size']} positions)", slower > CHEAP,
            "" if slower > CHEAP else even,
        ),
        Claim(
            "block sizes of 16 to 128 are about equally fast", "PagedAttention, section 7.2", "the best range",
            f"within {spread:.2f} times", spread <= CHEAP,
            "" if spread <= CHEAP else "the sizes were measured one after another; here, larger blocks are faster",
        ),
    ]  # fmt: skip
    described = (
        f"One decode step of {result['batch']} sequences of {result['context']:,} tokens with llama-125m (random "
        "weights), with the real engine, medians. The model of bytes is the time to read the step's weights and KV "
        f"once at the memory bandwidth, which the run measures ({result['gb_per_s']:g} GB/s). It does not depend on "
        "the block size, because a step reads only the positions that contain tokens. The paper measures the latency "
        "of whole requests, in which large blocks also cost memory: see the shares above.\n\n"
        + table(
            ["block size", "step (ms)", "bytes alone (ms)", "step / bytes"],
            [[row["block_size"], row["ms"], row["floor_ms"], f"{row['ms'] / row['floor_ms']:.2f}"] for row in rows],
        )
    )
    plot = lines(
        "Time of a decode step by block size",
        axis_of("block size", [row["block_size"] for row in rows], log=True),
        axis_of("ms", [row["ms"] for row in rows], zero=True),
        {
            "step": [(row["block_size"], row["ms"]) for row in rows],
            "bytes alone": [(row["block_size"], row["floor_ms"]) for row in rows],
        },
    )
    return Section("Time of a step by block size", described, claims, {"step_by_block_size.svg": plot})
