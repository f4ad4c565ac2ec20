"""Starts the servers of the comparison, and suspends a peer's server while others are measured.

A peer's command line comes from the harness (`run_peer.py`, table SERVERS). The servers that are compared in the same
rounds stay up during all of these rounds, so that repetitions can be interleaved. A peer's server that is not being
measured is suspended with SIGSTOP, so that it uses no core. Our servers are never suspended, because their leases would
expire.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import statistics
import subprocess
import time
import urllib.request
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.served.startup import Served, free_ports, tail
from common.errors import StartupError


@dataclass(frozen=True, slots=True)
class Harness:
    """The directories of the peers' harness and of the environments that its README describes, with a model."""

    scripts: Path
    root: Path
    size: str = "M"
    dtype: str = "bfloat16"

    @property
    def model(self) -> Path:
        return self.root / "models" / f"{self.size}-{self.dtype}"

    @property
    def python(self) -> Path:
        """The Python interpreter of the environment with the packages of the load client and transformers."""
        return self.root / "base" / "bin" / "python"

    def missing(self, peer: str) -> str | None:
        """Returns the reason why this peer cannot be measured, or None if it can be measured."""
        llamacpp = self.root / "llamacpp_build/bin/llama-server"
        needs = {
            "vllm": [self.root / "vllm/bin/python", self.root / "vllm/lib/python3.11/site-packages/vllm"],
            "llamacpp": [llamacpp, self.root / f"gguf/{self.size}-bf16.gguf"],
            "llamacpp-q8": [llamacpp, self.root / f"gguf/{self.size}-q8_0.gguf"],
            "llamacpp-q4": [llamacpp, self.root / f"gguf/{self.size}-q4_0.gguf"],
            "openvino": [self.root / "ov/bin/python", self.root / f"ovm/{self.size}-fp16/openvino_model.xml"],
            "transformers": [self.root / "base/bin/transformers", self.model],
        }[peer]
        lacking = [str(path) for path in needs if not path.exists()]
        return f"no {lacking[0]}" if lacking else None


def check(harness: Harness) -> None:
    """Raises StartupError if the given folders are not the harness and its root."""
    for path in (harness.scripts / "run_peer.py", harness.scripts / "client.py", harness.python, harness.model):
        if not path.exists():
            raise StartupError(f"there is no {path}: PEERS= names the peers' harness, ROOT= what its README sets up")


def commands(harness: Harness) -> dict[str, Callable[..., tuple[list[str], str]]]:
    """Returns the table SERVERS of the harness's run_peer.py. Executes only the script's definitions, because importing
    the script runs it. Adds "llamacpp-q4", which the harness lacks, as "llamacpp-q8" with a different file.
    """
    path = harness.scripts / "run_peer.py"
    module = ast.parse(path.read_text())
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign)
    module.body = [node for node in module.body if isinstance(node, kinds)]
    names: dict[str, Any] = {"__file__": str(path), "__name__": "run_peer"}
    exec(compile(module, str(path), "exec"), names)
    servers: dict[str, Callable[..., tuple[list[str], str]]] = names["SERVERS"]

    def q4(*args: Any) -> tuple[list[str], str]:
        command, model = servers["llamacpp-q8"](*args)
        return [word.replace("-q8_0.gguf", "-q4_0.gguf") for word in command], model

    return {**servers, "llamacpp-q4": q4} if "llamacpp-q8" in servers else servers


@dataclass(slots=True)
class Target:
    """A server to measure. `url` is empty for a peer that runs inside the client's process."""

    name: str
    url: str = ""
    pid: int = 0
    model: str = "m"
    """The model name in requests."""
    startup_s: float = 0.0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    """The process of a peer, which is suspended while others are measured."""

    def awake(self) -> AbstractContextManager[None]:
        """Returns a context manager that resumes a peer's process, and suspends it again at the end. Our own servers
        are never suspended.
        """
        return nullcontext() if self.process is None else self._running(self.process.pid)

    @contextmanager
    def _running(self, group: int) -> Iterator[None]:
        os.killpg(group, signal.SIGCONT)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGSTOP)


@contextmanager
def peer_server(harness: Harness, name: str, log: Path, ready_s: float = 240.0) -> Iterator[Target]:
    """Starts a peer's server, waits until it is ready, suspends it and yields it. Raises StartupError with the server's
    last output if it does not become ready.
    """
    [port] = free_ports(1)
    options = Namespace(root=harness.root, size=harness.size, dtype=harness.dtype, port=port, kv_gib=2)
    environment = dict(os.environ, OMP_NUM_THREADS="2", TOKENIZERS_PARALLELISM="false")
    command, model = commands(harness)[name](options, environment)
    started = time.perf_counter()
    with open(log, "w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    target = Target(name, f"http://127.0.0.1:{port}", process.pid, model, process=process)
    try:
        await_health(target.url, process, ready_s, log)
        target.startup_s = time.perf_counter() - started
        os.killpg(process.pid, signal.SIGSTOP)
        yield target
    finally:
        end(process)


def await_health(url: str, process: subprocess.Popen[bytes], ready_s: float, log: Path) -> None:
    deadline = time.perf_counter() + ready_s
    while process.poll() is None and time.perf_counter() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=2.0):
            return
        time.sleep(0.25)
    how = "not ready in time" if process.poll() is None else f"ended with status {process.returncode}"
    raise StartupError(f"{how}; its last output: {tail(log)}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the whole process group, even if it is suspended or its leader has ended."""
    for number, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            os.killpg(process.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)


def first_token_s(model: Path, starts: int = 3) -> float:
    """Returns the median time in seconds from the start of `looseleaf serve` to the first token. No other server may
    run at the same time. The first start may have to read its files from disk.
    """
    seconds = []
    for _ in range(starts):
        with Served(str(model), ["--roles", "both"]) as served:
            seconds.append(served.first_token_s)
    return statistics.median(seconds)


@contextmanager
def our_server(model: Path, roles: str, log: Path, flags: tuple[str, ...] = (), name: str = "") -> Iterator[Target]:
    """Yields a running `looseleaf serve` with these roles. `name` is the server's name in the results, by default
    looseleaf-ROLES.
    """
    with Served(str(model), ["--roles", roles, *flags], log) as served:
        yield Target(name or f"looseleaf-{roles}", served.url, served.pid, startup_s=served.first_token_s)
