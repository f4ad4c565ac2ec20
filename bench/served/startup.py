"""Runs `looseleaf serve` as a process, and measures the time to the first token and memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from common.errors import StartupError

FIRST_PROMPT = list(range(10, 26))
_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")
_TICKS = os.sysconf("SC_CLK_TCK")


class Served:
    """A running `looseleaf serve` process. Leaving the context ends it."""

    def __init__(self, model: str, flags: Sequence[str] = (), log: Path | None = None, start_s: float = 120.0) -> None:
        """Starts the server, with its output in `log`. Raises StartupError if the server ends or there is no token
        within `start_s` seconds.
        """
        self.port, self.grpc_port = free_ports(2)
        ports = ["--port", str(self.port), "--grpc-port", str(self.grpc_port)]
        command = [sys.executable, "-m", "looseleaf", "serve", model, *ports, "--served-model-name", "m", *flags]
        started = time.perf_counter()
        with open(log or os.devnull, "w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        self.pid = self._process.pid
        self.url, self.grpc = f"http://127.0.0.1:{self.port}", f"127.0.0.1:{self.grpc_port}"
        try:
            self._await_first_token(started + start_s, log)
        except BaseException:
            self.stop()
            raise
        self.first_token_s = time.perf_counter() - started
        self.first_token_cpu_s = cpu_seconds(self.pid)

    def _await_first_token(self, deadline: float, log: Path | None) -> None:
        while self._process.poll() is None and time.perf_counter() < deadline:
            with contextlib.suppress(OSError):
                return first_token(self.url)
            time.sleep(0.02)
        raise StartupError(f"looseleaf serve produced no token; its last output: {tail(log)}")

    def stop(self) -> None:
        """Stops the server: sends SIGTERM, and SIGKILL if it has not ended after 30 s."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def tail(log: Path | None) -> str:
    """Returns the last eight lines of a log, or "not kept" if there is no log."""
    return "not kept" if log is None else "\n".join(log.read_text(errors="replace").splitlines()[-8:])


def first_token(url: str) -> None:
    """Sends a short request, and waits for its first event. Raises OSError if the connection or the request fails."""
    body = {"model": "m", "prompt": FIRST_PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60.0) as reply:
        if not reply.readline().startswith(b"data:"):
            raise OSError("the stream began without an event")


def free_ports(count: int) -> list[int]:
    """Returns `count` free ports."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def tree(pid: int) -> Iterator[int]:
    """Yields `pid` and the pids of all its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process tree in seconds, including children that have ended and been reaped."""
    ticks = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{member}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
    return ticks / _TICKS


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a process tree (proportional set size) in MiB. Shared memory counts once."""

    total: float
    arena: float
    """The touched pages of the KV arena, which are part of the total."""
    weights: float
    """The size of one copy of the model's weights, from its files or its configuration."""

    @property
    def beyond(self) -> float:
        """The memory that is neither KV nor one copy of the weights."""
        return self.total - self.arena - self.weights

    def row(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in {**asdict(self), "beyond": self.beyond}.items()}


def memory(pid: int, weights_bytes: int) -> Memory:
    """Returns the current memory of the process tree of `pid`."""
    total = arena = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            for name, kib in mappings(Path(f"/proc/{member}/smaps").read_text()):
                total += kib
                arena += kib if Path(name).name == "arena" else 0
    return Memory(total / 1024, arena / 1024, weights_bytes / (1 << 20))


def mappings(smaps: str) -> Iterator[tuple[str, int]]:
    """Yields (file or "", proportional set size in KiB) for every mapping in the text of a /proc/PID/smaps."""
    name = ""
    for line in smaps.splitlines():
        if found := _MAPPING.match(line):
            name = found[1]
        elif line.startswith("Pss:"):
            yield name, int(line.split()[1])


def weights_bytes(model: str) -> int:
    """Returns the total size of a directory's safetensors files in bytes."""
    return sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
