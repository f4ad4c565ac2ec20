"""Measures the speed of Looseleaf on this CPU (`make bench`).

Runs each benchmark as a separate process: kernels compared with the machine's measured limits, decode steps, and
`looseleaf serve` (start-up, workloads, memory, batching, latency). Stores all results in one file below
docs/benchmarks/cpu with date, commit and machine. If all benchmarks were run, also updates the section for this class
of CPU (its instruction set) in the README there.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import Field

from bench.served import machine
from common.errors import StartupError
from common.settings import Settings, settings_config

PARTS = {
    "kernels": (["bench.kernels"], ["--seconds", "0.1"]),
    "engine": (["bench.engine", "--batches", "1", "8", "32"], ["--steps", "5"]),
    "served": (["bench.served.cpu_served"], ["--requests", "8", "--rounds", "1"]),
    "batching": (["loadtest.batching"], ["--rounds", "1"]),
    "latency": (["loadtest.latency"], ["--num-prompts", "1", "--refusals", "20", "--burst", "50"]),
}
"""The command of each part (for kernels, one run per kernel), and the flags that make it quick."""
PAGE = machine.RESULTS / "README.md"
BEGIN, END = "<!-- newest runs: written by make bench -->", "<!-- end of newest runs -->"


class CpuSettings(Settings):
    """The settings of `python -m bench.served.cpu`."""

    model_config = settings_config("LOOSELEAF_BENCH_", "bench.served.cpu")

    only: list[str] = Field([], description=f"which of {', '.join(PARTS)}; default: all")
    quick: bool = Field(False, description="a rehearsal in about a minute; nothing is kept")
    keep: bool = Field(True, description="write the result and the page's section")


def run_part(name: str, *, quick: bool) -> Any:
    """Returns the result of one benchmark, or for kernels one result per kernel. Raises StartupError if the benchmark
    failed.
    """
    command, less = PARTS[name]
    options = less if quick else []
    if name == "kernels":
        kernels = importlib.import_module("bench.kernels").CASES
        return {kernel: last_line([*command, kernel, *options]) for kernel in kernels}
    return last_line([*command, *options])


def last_line(command: Sequence[str]) -> Any:
    """Runs a benchmark, and returns the JSON value in the last line of its output. Raises StartupError if the benchmark
    fails or prints no such line.
    """
    print(f"== python -m {' '.join(command)}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = ""
    for line in process.stdout:
        print(line, end="", flush=True)
    if process.wait() == 0:
        with suppress(json.JSONDecodeError):
            return json.loads(line)
    raise StartupError(f"{command[0]} ended with status {process.returncode} and no result")


def shares(kernels: Any) -> Iterator[dict[str, Any]]:
    """Yields every case with a share of a limit in the output of the kernel benchmark."""
    if isinstance(kernels, dict):
        if "share" in kernels and "name" in kernels:
            yield kernels
        for value in kernels.values():
            yield from shares(value)
    elif isinstance(kernels, list):
        for value in kernels:
            yield from shares(value)


def table(result: dict[str, Any]) -> str:
    """Returns the results of a run as Markdown tables."""
    lines = [
        f"{result['date']}, commit {result['commit']}, {result['cores']} cores of {result['cpu']}, "
        f"{result['memory_gib']} GiB, load {result['load1']} at the start."
    ]
    if cases := list(shares(result.get("kernels"))):
        lines += ["", "| kernel | threads | best ms | rate | of the measured limit |", "|---|---|---|---|---|"]
        lines += [
            f"| {case['name']} | {case['threads']} | {case['best_ms']:.3f} | {case['rate']:.3g} {case['unit']} "
            f"| {case['share']:.0%} |"
            for case in cases
        ]
    if engine := result.get("engine"):
        lines += ["", "| decode step, batch | context | ms | tok/s | floor / step |", "|---|---|---|---|---|"]
        lines += [
            f"| {run['batch']} | {run['context']} | {run['ms']} | {run['tokens_per_s']} | {run['of_floor']:.0%} |"
            for run in engine["decode"]
        ]
    if served := result.get("served"):
        lines += ["", *served_table(served)]
    return "\n".join(lines)


def served_table(served: dict[str, Any]) -> list[str]:
    lines = ["| served | out tok/s | TTFT p50, p99 ms | ITL p50, p99 ms | first token s | MiB beyond weights and KV |"]
    lines.append("|---|---|---|---|---|---|")
    for roles in ("both", "split"):
        found = served[roles]
        for kind in ("served", "prefix"):
            row = found[kind]
            waits = (f"{row[f'{wait}_p50_ms']}, {row[f'{wait}_p99_ms']}" for wait in ("ttft", "itl"))
            alone = (str(found["first_token_s"]), str(found["memory_mib"]["beyond"]))
            lines.append("| " + " | ".join((f"{roles}, {kind}", str(row["out_tok_s"]), *waits, *alone)) + " |")
    return lines


def with_section(page: str, name: str, text: str) -> str:
    """Returns `page`, in which `text` is the section about the CPUs of class `name`, between the page's two markers.
    The sections of other classes stay. Raises ValueError if a marker is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN!r} or {END!r}")
    titles_and_texts = re.split(r"^### (.+)\n", inside, flags=re.MULTILINE)[1:]
    sections = dict(zip(titles_and_texts[::2], titles_and_texts[1::2], strict=True)) | {name: text}
    parts = [f"### {title}\n\n{sections[title].strip()}" for title in machine.CLASSES if title in sections]
    return "\n\n".join([before + begin, *parts, end + after])


def keep(result: dict[str, Any], origin: dict[str, Any], page: Path = PAGE) -> Path:
    """Writes the result to a file, and updates the page's section if all parts were run. Returns the file's path."""
    path = machine.keep("bench", result, origin, page.parent)
    if set(PARTS) <= set(result):
        page.write_text(with_section(page.read_text(), machine.class_of(origin), table({**origin, **result})))
    return path


def chosen(only: Sequence[str]) -> list[str]:
    """Returns the names of the chosen parts, or of all parts if `only` is empty. Raises StartupError for an unknown
    name.
    """
    for name in only:
        if name not in PARTS:
            raise StartupError(f"--only {name!r}: must be one of {', '.join(PARTS)}")
    return [name for name in PARTS if not only or name in only]


def main(settings: CpuSettings) -> None:
    names, origin = chosen(settings.only), machine.provenance()
    result = {"benchmark": "cpu", **{name: run_part(name, quick=settings.quick) for name in names}}
    print(table({**origin, **result}))
    if settings.keep and not settings.quick:
        print(f"kept as {keep(result, origin)}")
    print(json.dumps({**origin, **result}))


if __name__ == "__main__":
    try:
        main(CpuSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.cpu: {error}", file=sys.stderr)
        sys.exit(1)
