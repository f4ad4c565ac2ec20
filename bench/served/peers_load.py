"""Runs the harness's load client and its comparison of outputs against one target.

The client belongs to the harness, so it measures every target in the same way.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.served.peers_servers import Harness, Target
from bench.served.startup import tail

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """The workload of the client."""

    requests: int = 64
    clients: int = 16
    quiet_s: float = 10.0
    """The longest wait for an idle machine before a repetition, in seconds."""
    redo: int = 0
    """The maximum number of times that a repetition is repeated because other processes have disturbed it."""
    limit_s: float = 300.0
    """The time limit for one run of the client, in seconds."""


class Failed(Exception):
    """The error of a client or target that failed."""


def run_client(harness: Harness, target: Target, tests: Sequence[str], seed: int, load: Load) -> list[Row]:
    """Runs the client once. Returns one row per test. The prompts depend on `seed`. Raises Failed if the client fails
    or takes longer than `load.limit_s`.
    """
    python, where = harness.python, ["--url", target.url, "--model", target.model, "--pid", str(target.pid)]
    if not target.url:
        python = harness.root / "ov/bin/python"
        model = harness.root / f"ovm/{harness.size}-fp16"
        where = ["--adapter", f"{harness.scripts}/adapters.py:OVGenAI", "--model", str(model)]
    command = [
        str(python), str(harness.scripts / "client.py"), *where, "--peer", target.name,
        "--model-tag", harness.model.name, "--data", str(harness.root / "models"), "--tests", ",".join(tests),
        "--reps", "1", "--seed", str(seed), "--requests", str(load.requests), "--clients", str(load.clients),
        "--quiet", str(load.quiet_s), "--redo", str(load.redo),
    ]  # fmt: skip
    if target.name.startswith("transformers"):
        command.append("--strict-openai")
    return json_lines(command, load.limit_s)


def json_lines(command: Sequence[str], limit_s: float) -> list[Row]:
    """Runs a command. Returns the JSON lines of its output. Raises Failed if the command fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {limit_s:g} s") from None
    if done.returncode:
        raise Failed(" / ".join(done.stderr.strip().splitlines()[-2:]))
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def same_output(harness: Harness, url: str) -> dict[str, int]:
    """Returns the number of characters of greedy output that equal those of transformers in float32, and the number of
    all characters (`check_same.py`).
    """
    reference = harness.root / "models" / f"{harness.size}-float32"
    rows = json_lines([str(harness.python), str(harness.scripts / "check_same.py"), str(reference), url], 300.0)
    return {name: sum(row[name] for row in rows) for name in ("same_chars", "of")}


def transformers_rows(harness: Harness, way: str, requests: int, limit_s: float) -> list[Row]:
    """Runs the served workload in transformers. `way` is "alone" or "static" (`peers_transformers.py`)."""
    script = Path(__file__).with_name("peers_transformers.py")
    options = ["--harness", str(harness.scripts), "--root", str(harness.root), "--size", harness.size]
    command = [str(harness.python), str(script), way, *options, "--requests", str(requests)]
    return json_lines(command, limit_s)


def last_words(log: Path) -> str:
    return tail(log).replace("\n", " / ")
