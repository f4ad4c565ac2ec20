"""The load test with real processes: locust with a server, and its exit status without a server."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from looseleaf import LLM

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=2048) as running:
        yield running


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_both_protocols_without_a_failure(llm: LLM, tmp_path: Path) -> None:
    where = ["--http", llm.addresses.http, "--grpc", llm.addresses.grpc, "--csv", str(tmp_path / "load")]
    done = run(*where, "--users", "4", "--run-time", "5s", "--output-median", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "load_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    for protocol in ("grpc", "http"):
        for name in ("ttft", "itl", "e2e"):
            row = rows[protocol, name]
            assert int(row["Request Count"]) > 0 and int(row["Failure Count"]) == 0, row


def test_refused_requests_are_failures(llm: LLM) -> None:
    """The HTTP users connect to a gRPC port."""
    done = run("--http", llm.addresses.grpc, "--grpc", llm.addresses.grpc, "--users", "2", "--run-time", "3s")
    assert done.returncode == 1, done.stdout + done.stderr


def test_a_mistyped_flag_stops_the_start() -> None:
    done = run("--user", "3")
    assert done.returncode == 2 and "--user" in done.stderr
