"""The load test with real processes: locust with a server, alone and with workers, its results and its exit status."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from looseleaf import LLM
from looseleaf.simulation import trace
from testing.chaos.stack import free_ports

ROOT = Path(__file__).resolve().parents[2]
LOCUST = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_blocks=2048) as running:
        yield running


@pytest.fixture
def where(llm: LLM) -> list[str]:
    return ["--http", llm.addresses.http, "--grpc", llm.addresses.grpc]


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """A trace of 30 requests within 2 s, of which each shares its first 32 tokens with others."""
    rows = [
        {
            "timestamp": 70 * number, "input_length": 32 + number, "output_length": 1 + number % 7,
            "hash_ids": [number % 3, 100 + number], "hash_block_size": 32,
        }
        for number in range(30)
    ]  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open() as file:
        return {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}


def wait(condition: Callable[[], Any]) -> Any:
    """Waits until the condition returns something true, and returns it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("waited for 120 s")


def test_both_protocols_without_a_failure(where: list[str], tmp_path: Path) -> None:
    done = run(
        *where, "--csv", str(tmp_path / "load"), "--users", "4", "--run-time", "5s", "--output-median", "8",
        "--slo-e2e", "0.000001", "--shape", "diurnal", "--shape-period", "4",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr  # no request can meet the limit
    assert "SLO MISSED" in done.stdout
    rows = rows_of(tmp_path / "load_stats.csv")
    for protocol in ("grpc", "http"):
        for name in ("ttft", "itl", "tpot", "e2e"):
            row = rows[protocol, name]
            assert int(row["Request Count"]) > 0 and int(row["Failure Count"]) == 0, row
    found = figures(done)
    assert found["answered"] == found["sent"] >= int(rows["", "Aggregated"]["Request Count"])  # the CSV may be 1 s old
    assert found["slo"]["attained"] == 0


def test_two_workers_send_each_request_of_a_trace_once(where: list[str], mooncake: Path, tmp_path: Path) -> None:
    """The numbers of tokens are those of the trace, and each histogram has the observations of both workers."""
    report, prefix = tmp_path / "report.html", tmp_path / "load"
    done = run(
        *where, "--trace", str(mooncake), "--processes", "2", "--html", str(report), "--csv", str(prefix),
        "--slo-ttft", "100", "--slo-tpot", "100",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found, requests = figures(done), trace.read(mooncake)
    assert found["sent"] == found["answered"] == len(requests) and found["unsent"] == found["cut"] == 0
    assert found["tokens_in"] == sum(request.prompt_len for request in requests)
    assert found["tokens_out"] == sum(request.output_len for request in requests)
    assert found["slo"]["attained"] == 1 and "SLO met" in done.stdout
    times, rows = found["times_ms"], rows_of(tmp_path / "load_stats.csv")
    assert times["ttft"]["count"] == times["e2e"]["count"] == times["late"]["count"] == len(requests)
    assert times["tpot"]["count"] == sum(request.output_len > 1 for request in requests)
    for name in ("ttft", "itl", "tpot", "e2e"):  # locust adds its own entries up by itself
        ours, entries = times[name], [rows[protocol, name] for protocol in ("grpc", "http")]
        assert ours["count"] == sum(int(row["Request Count"]) for row in entries)
        assert ours["max"] == pytest.approx(max(float(row["Max Response Time"]) for row in entries), abs=0.001)
        whole = sum(float(row["Average Response Time"]) * int(row["Request Count"]) for row in entries)
        assert ours["mean"] * ours["count"] == pytest.approx(whole, rel=0.001)
    page = report.read_text()
    assert page.count('<section id="looseleaf">') == 1
    for part in ("30 requests sent, 30 answered", "SLO met", "<td>tpot</td>", "<title>ttft, ms</title>"):
        assert part in page


def test_requests_of_a_lost_worker_are_missed(llm: LLM, mooncake: Path) -> None:
    port = str(free_ports(1)[0])
    host = ["--host", f"http://{llm.addresses.http}", "--grpc", llm.addresses.grpc]
    master_flags = ["--master", "--headless", "--expect-workers", "2", "--master-bind-port", port]
    worker_flags = ["--worker", "--master-host", "127.0.0.1", "--master-port", port]
    speed = ["--trace", str(mooncake), "--speed", "0.1"]  # 20 s
    master = subprocess.Popen(
        [*LOCUST, *master_flags, *host, *speed], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    workers = [subprocess.Popen([*LOCUST, *worker_flags], cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        assert master.stderr is not None
        for line in master.stderr:
            if "Spawning is complete" in line or "All users spawned" in line:
                break
        workers[0].kill()
        output, _ = master.communicate(timeout=200)
        found = json.loads(output.splitlines()[-1])
        assert master.returncode == 1
        assert found["unsent"] > 0 and found["sent"] + found["unsent"] == 30
        assert found["answered"] == found["sent"] and "a worker process failed or was lost" in output
    finally:
        for process in (master, *workers):
            process.kill()
            process.wait()


def test_the_page_shows_the_result_while_the_run_goes_on(where: list[str], mooncake: Path, tmp_path: Path) -> None:
    port, report = free_ports(1)[0], tmp_path / "report.html"
    command = [sys.executable, "-m", "loadtest", *where, "--web", str(port), "--html", str(report)]
    load = subprocess.Popen(
        [*command, "--trace", str(mooncake), "--slo-ttft", "100"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip

    def get(path: str, data: bytes | None = None) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=30) as reply:
            return str(reply.read().decode())

    def stats() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(get("/looseleaf/stats"))
        return found

    try:
        page = wait(lambda: get("/"))
        assert '"key": "looseleaf"' in page and 'id="looseleaf-charts"' in page
        assert stats()["sent"] == 0 and "0 requests sent" in get("/looseleaf/charts")
        for _ in range(2):  # a run that is started again begins with an empty record
            assert json.loads(get("/swarm", b""))["success"]
            found = wait(lambda: stats() if stats()["answered"] == 30 else None)
            wait(lambda: json.loads(get("/stats/requests"))["state"] == "stopped")
        assert found["slo"]["attained"] == 1
        assert sum(rate for _, rate in found["series"]["tokens/s"]["out"]) > 0
        assert {"ttft, ms", "itl, ms", "tpot, ms", "e2e, ms", "requests/s"} <= set(found["series"])
        for text in (get("/looseleaf/charts"), get("/stats/report")):
            assert "<td>ttft</td>" in text and "<title>itl, ms</title>" in text and "SLO met" in text
        os.killpg(load.pid, signal.SIGINT)  # as Ctrl-C does
        output, _ = load.communicate(timeout=120)
        assert load.returncode == 0 and "30 requests sent, 30 answered" in output
        assert "<title>itl, ms</title>" in report.read_text()
    finally:
        if load.poll() is None:
            os.killpg(load.pid, signal.SIGKILL)
        load.wait()


def test_refused_requests_are_failures(llm: LLM) -> None:
    """The HTTP users connect to a gRPC port."""
    done = run("--http", llm.addresses.grpc, "--grpc", llm.addresses.grpc, "--users", "2", "--run-time", "3s")
    assert done.returncode == 1, done.stdout + done.stderr
    assert sum(figures(done)["failed"].values()) > 0


def test_a_missing_trace_ends_the_workers_too(where: list[str]) -> None:
    done = run(*where, "--trace", "missing.jsonl", "--processes", "2")
    assert done.returncode == 2 and "missing.jsonl" in done.stderr


def test_a_mistyped_flag_stops_the_start() -> None:
    done = run("--user", "3")
    assert done.returncode == 2 and "--user" in done.stderr
