"""Measures the effect of hostile request bodies on other streams (`make bench-hostile`).

Serves the built-in model, keeps some streams running, and sends each body of `hostile_bodies` at the largest accepted
size. For each body, prints the status and the longest time to the reply, the longest gap between two events of a stream
with and without the body, and by how much the gateway's peak memory exceeds its memory at the start. Each gap is the
shortest of several measurements, because other work on the machine can only make gaps longer. At the end, prints the
median time of GET /v1/models over one connection. The last line is JSON.
"""

from __future__ import annotations

import http.client
import json
import platform
import re
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import Field

from bench.served.hostile_bodies import HOSTILE_BODIES, HostileBody
from common.errors import StartupError
from common.settings import Settings, settings_config
from looseleaf.llm import LLM

STREAM = {"prompt": "Once upon a time", "max_tokens": 800, "ignore_eos": True, "temperature": 0, "stream": True}
MIB = 1 << 20


class HostileSettings(Settings):
    """The settings of the hostile body benchmark."""

    model_config = settings_config("LOOSELEAF_HOSTILE_", "bench.served.hostile")

    repeats: int = Field(5, ge=1, le=100, description="how often each body is sent")
    quiet_s: float = Field(0.2, gt=0, description="seconds for which streams are watched, without and with each body")
    only: str = Field("", description="send only bodies whose name contains this")
    streams: int = Field(2, ge=1, le=64, description="streams that run meanwhile")


@dataclass(slots=True)
class Row:
    """The results of one body."""

    name: str
    num_bytes: int
    status: int
    reply_ms: float
    quiet_gap_ms: float
    gap_ms: float
    rss_mib: float
    """The gateway's peak memory while this body was sent, minus its memory before the first body."""


class Watched:
    """A set of streams that run repeatedly, with the longest gap in any of them."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._over = threading.Event()
        self._gap = 0.0
        self._last = [time.monotonic()] * count
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def gap_ms(self) -> float:
        """Returns the longest gap since the last call in milliseconds, including a gap that has not ended."""
        now = time.monotonic()
        gap, self._gap = max(self._gap, *(now - last for last in self._last)), 0.0
        return gap * 1e3

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(10.0)

    def _run(self, index: int) -> None:
        while not self._over.is_set():
            connection = http.client.HTTPConnection(self._address, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(STREAM), {"content-type": "application/json"})
            reply = connection.getresponse()
            self._last[index] = time.monotonic()
            while reply.readline() and not self._over.is_set():
                now = time.monotonic()
                self._gap = max(self._gap, now - self._last[index])
                self._last[index] = now
            connection.close()


def send(address: str, path: str, body: bytes) -> tuple[int, float, str]:
    """Sends a POST over a new connection. Returns (status, seconds, text)."""
    connection = http.client.HTTPConnection(address, timeout=120)
    began = time.monotonic()
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
    finally:
        connection.close()
    return reply.status, time.monotonic() - began, text


def largest(address: str, path: str) -> int:
    """Returns the size of the largest accepted body in bytes, from the error message for a larger body."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.putrequest("POST", path)
    connection.putheader("content-length", str(1 << 40))
    connection.endheaders()
    message = connection.getresponse().read().decode()
    connection.close()
    found = re.search(r"at most (\d+) bytes", message)
    assert found is not None, message
    return int(found[1])


class Memory:
    """The resident memory of a process and its peak."""

    def __init__(self, pid: int) -> None:
        self._root = Path(f"/proc/{pid}")
        self.before = self._kib("VmRSS")

    def reset_peak(self) -> None:
        (self._root / "clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Returns by how much the peak exceeds the memory at construction, in MiB."""
        return (self._kib("VmHWM") - self.before) / 1024

    def _kib(self, name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+)", (self._root / "status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1])


def measure(llm: LLM, bodies: list[HostileBody], settings: HostileSettings) -> list[Row]:
    address = llm.addresses.http
    sizes = {path: largest(address, path) for path in {body.path for body in bodies}}
    watched = Watched(address, settings.streams)
    time.sleep(settings.quiet_s)
    memory = Memory(llm.pids["gateway"])
    try:
        return [_row(address, body, sizes[body.path], settings, (watched, memory)) for body in bodies]
    finally:
        watched.close()


def _row(
    address: str, body: HostileBody, size: int, settings: HostileSettings, watching: tuple[Watched, Memory]
) -> Row:
    watched, memory = watching
    raw, quiet, sent, status, slowest = body.make(size), [], [], 0, 0.0
    memory.reset_peak()
    for _ in range(settings.repeats):
        watched.gap_ms()
        time.sleep(settings.quiet_s)
        quiet.append(watched.gap_ms())
        status, took, _ = send(address, body.path, raw)
        time.sleep(max(0.0, settings.quiet_s - took))
        sent.append(watched.gap_ms())
        slowest = max(slowest, took)
    gaps = min(quiet), min(sent)
    return Row(body.name, len(raw), status, slowest * 1e3, *gaps, memory.peak_mib())


def models_p50_ms(address: str, count: int = 200) -> float:
    """Returns the median time of GET /v1/models over one connection, in ms."""
    connection, times = http.client.HTTPConnection(address, timeout=10), []
    for _ in range(count):
        began = time.monotonic()
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
        times.append(time.monotonic() - began)
    connection.close()
    return statistics.median(times) * 1e3


def show(rows: list[Row], p50_ms: float) -> None:
    print(f"{'body':32}{'bytes':>10}{'status':>8}{'reply ms':>10}{'quiet gap':>11}{'gap ms':>9}{'more':>7}{'MiB':>8}")
    for row in rows:
        more = row.gap_ms - row.quiet_gap_ms
        print(
            f"{row.name:32}{row.num_bytes:>10}{row.status:>8}{row.reply_ms:>10.1f}{row.quiet_gap_ms:>11.1f}"
            f"{row.gap_ms:>9.1f}{more:>7.1f}{row.rss_mib:>8.1f}"
        )
    print(f"worst gap more: {max(r.gap_ms - r.quiet_gap_ms for r in rows):.1f} ms; "
          f"memory: +{max(r.rss_mib for r in rows):.1f} MiB; GET /v1/models p50 {p50_ms:.2f} ms")  # fmt: skip


def main(settings: HostileSettings) -> None:
    with LLM(roles="split") as llm:
        rows = measure(llm, [body for body in HOSTILE_BODIES if settings.only in body.name], settings)
        p50_ms = models_p50_ms(llm.addresses.http)
    show(rows, p50_ms)
    machine = platform.processor() or platform.machine()
    print(json.dumps({"rows": [asdict(row) for row in rows], "models_p50_ms": p50_ms, "machine": machine}))


if __name__ == "__main__":
    try:
        main(HostileSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.hostile: {error}", file=sys.stderr)
        sys.exit(1)
