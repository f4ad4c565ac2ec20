"""`looseleaf serve` as a user runs it: a line of text when it is ready, an orderly end, one sentence if it cannot
start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import grpc
import pytest

from common.errors import Unauthenticated, Unavailable
from looseleaf import metrics_page
from looseleaf.client import Client
from looseleaf.commands.certs import make
from looseleaf.results import Completion
from looseleaf.serve.device import why_no_gpu
from looseleaf.serve.model_source import cache_directory, tiny_checkpoint
from looseleaf.serve.placement import settled, worker_processes
from looseleaf.serve.settings import ServeSettings
from looseleaf.serve.shm import ROOT as SHM
from looseleaf.serve.shm import sweep
from protos.v1.block_store_pb2 import InspectResponse
from testing.system import assert_nothing_held, inspect, wait_for

ROOT = Path(__file__).resolve().parents[2]
PROMPT_LEN = 80
SPARE = "looseleaf.both_roles.spare"
FREE_PORTS = ["--port", "0", "--grpc-port", "0", "--num-blocks", "512"]


class Served:
    """A running `looseleaf serve`, and its output until it was ready. It ends with its test at the latest."""

    begun: ClassVar[list[Served]] = []

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "looseleaf", "serve", *FREE_PORTS, *flags]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        Served.begun.append(self)
        assert self.process.stdout is not None
        self.lines: list[str] = []
        for line in self.process.stdout:
            self.lines.append(line)
            if "  says  " in line:
                break
        self.services = services_of(self.process.pid)
        self.directories = directories_of(self.process.pid)

    @property
    def grpc(self) -> str:
        return next(m[1] for line in self.lines if (m := re.search(r"gRPC  (\S+)", line)))

    @property
    def store(self) -> str:
        return next(m[1] for line in self.lines if (m := re.search(r"looseleaf blocks (\S+)\)", line)))

    def kill(self, service: str) -> bool:
        """Sends SIGKILL to a service. Returns whether a new process of that service has started."""
        pid = services_of(self.process.pid)[service]
        os.kill(pid, signal.SIGKILL)
        came = lambda: services_of(self.process.pid).get(service, pid) != pid  # noqa: E731
        return wait_for(came, bool, 30.0, f"{service} is not started again")

    def wait_for_store(self) -> InspectResponse:
        def answer() -> InspectResponse | None:
            with contextlib.suppress(grpc.RpcError):
                return inspect(self.store)
            return None

        found = wait_for(answer, lambda found: found is not None, 60.0, "no store answers at its address")
        assert found is not None
        return found

    def generate(self) -> Completion:
        """Waits until the gateway answers. Returns its answer to a fixed request."""
        with Client(self.grpc, timeout=60.0) as client:
            ask = lambda: attempt(client)  # noqa: E731
            found = wait_for(ask, lambda found: found is not None, 60.0, "no gateway answers at its address")
        assert found is not None
        return found

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Sends a signal. Returns the exit status and stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """Ensures that a failed test leaves no processes running."""
    yield
    while Served.begun:
        process = Served.begun.pop().process
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=120)


def attempt(client: Client) -> Completion | None:
    with contextlib.suppress(Unavailable):
        return client.generate(list(range(20, 20 + PROMPT_LEN)), max_tokens=8, temperature=0.0, ignore_eos=True)
    return None


def redis_of(parent: int) -> int:
    """Returns the pid of a launcher's private redis-server."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return next(pid for pid in pids if "redis-server" in Path(f"/proc/{pid}/cmdline").read_text())


def services_of(parent: int) -> dict[str, int]:
    """Returns the pid of each service that a launcher has started, by package."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if "looseleaf.serve.child" in words and words[words.index("looseleaf.serve.child") + 1] == str(parent):
            found[words[words.index("looseleaf.serve.child") + 2]] = int(entry.name)
    return found


def alive(pids: Iterator[int] | list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes()]


def directories_of(pid: int) -> list[Path]:
    """Returns the launcher's directories in shared memory, of which it holds the lock file open."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
            if (name := os.readlink(descriptor)).startswith(f"{SHM}/looseleaf-run-"):
                found.append(Path(name).parent)
    return found


def test_a_line_of_text_then_an_orderly_end() -> None:
    served = Served()
    assert len(served.directories) == 1 and served.directories[0].exists()
    out = "".join(served.lines)
    assert re.search(r"  says  Once upon a time\S", out), out
    workers = {package for _, package in worker_processes(settled(ServeSettings()))}
    assert set(served.services) - {SPARE} == {"block_store", "gateway"} | workers
    for service, pid in served.services.items():
        if service == SPARE:
            continue
        mapped = Path(f"/proc/{pid}/maps").read_text()
        computes = service in workers
        assert ("libtorch" in mapped, "libgomp" in mapped) == (computes, computes), f"OpenMP in {service}"
    status, errors = served.end(signal.SIGTERM)
    assert status == 0
    [told] = [line for line in errors.splitlines() if "spare worker (" in line]
    assert re.match(r"looseleaf: an? spare worker|looseleaf: no spare worker", told) and "GiB" in told
    assert told.startswith("looseleaf: no") or SPARE in served.services
    assert alive(list(served.services.values())) == []
    assert not served.directories[0].exists()


def test_the_sample_suits_the_certificates_the_tenants_and_the_context(tmp_path: Path) -> None:
    front, inside, keys = tmp_path / "front", tmp_path / "inside", tmp_path / "keys"
    for directory in (front, inside):  # each with a CA of its own
        directory.mkdir()
        make(directory, [], timedelta(days=1))
    keys.write_text("zoo a-key requests_per_minute=1\nlate another best_priority=10\n")
    certificates = ["--ssl-certfile", f"{front}/front.pem", "--ssl-keyfile", f"{front}/front.key"]
    certificates += ["--tls-cert", f"{inside}/inside.pem", "--tls-key", f"{inside}/inside.key"]
    certificates += ["--tls-ca", f"{inside}/ca.pem"]
    served = Served("--api-key-file", str(keys), "--max-model-len", "24", *certificates)
    assert re.search(r"  says  Once upon a time\S", served.lines[-1]), served.lines[-1]
    assert served.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address(host: str) -> None:
    served = Served("--host", host, "--roles", "both", "--spare", "0")
    assert "  says  Once" in served.lines[-1] and served.grpc.startswith("[::1]:")
    http = next(m[1] for line in served.lines if (m := re.search(r"HTTP  http://(\S+)/v1", line)))
    assert metrics_page.read(http)
    assert served.end(signal.SIGTERM)[0] == 0


def test_complete_and_health_from_the_command_line() -> None:
    served = Served()
    try:
        command = [sys.executable, "-m", "looseleaf"]
        common = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60}
        flags = ["--address", served.grpc, "--temperature", "0", "--max-tokens", "8"]
        done = subprocess.run([*command, "complete", "Once upon a time", *flags], **common)  # type: ignore[call-overload]
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        again = subprocess.run([*command, "complete", "-", *flags], input="Once upon a time", **common)  # type: ignore[call-overload]
        assert again.stdout == done.stdout
        talk = subprocess.run([*command, "chat", *flags], input="hello\nagain\n", **common)  # type: ignore[call-overload]
        assert talk.returncode == 0 and talk.stdout.count("\n") >= 2, talk.stderr
        refused = subprocess.run([*command, "complete", "x", "--top-p", "7", *flags], **common)  # type: ignore[call-overload]
        assert refused.returncode == 1 and "top_p" in refused.stderr and refused.stderr.count("\n") == 1
        healthy = subprocess.run([*command, "health", served.grpc], **common)  # type: ignore[call-overload]
        assert healthy.returncode == 0 and "SERVING" in healthy.stdout
    finally:
        served.end(signal.SIGINT)


def test_ctrl_c_in_a_terminal_ends_redis_last() -> None:
    """A terminal sends SIGINT to the launcher's whole process group."""
    served = Served("--roles", "both", "--spare", "0")
    assert served.process.stderr is not None
    os.read(served.process.stderr.fileno(), 1 << 20)  # only what is written from now on counts
    os.killpg(served.process.pid, signal.SIGINT)
    _, errors = served.process.communicate(timeout=120)
    assert served.process.returncode == 0
    assert "redis-server ended" not in errors and "WARNING" not in errors and "ERROR" not in errors


def test_what_dies_is_started_again_at_its_address_and_nothing_is_forgotten() -> None:
    """Kills the block store, the private Redis and the gateway, one after the other."""
    served = Served("--roles", "both", "--spare", "0")
    try:
        arena, first = inspect(served.store).arena_id, served.generate()
        assert served.kill("block_store") and served.generate().text == first.text, "workers need no store to go on"
        assert served.wait_for_store().arena_id == arena
        assert served.generate().usage.cached_tokens >= PROMPT_LEN - 16
        os.kill(redis_of(served.process.pid), signal.SIGKILL)
        assert served.generate().text == first.text
        assert served.kill("gateway")
        again = served.generate()
        assert again.text == first.text and again.usage.cached_tokens >= PROMPT_LEN - 16
        assert_nothing_held(served.store)
    finally:
        status, errors = served.end(signal.SIGTERM)
    assert status == 0 and not served.directories[0].exists(), "also what a store found, not made, is removed"
    for what in ("block_store was killed", "redis-server ended", "gateway was killed"):
        assert len(re.findall(f"^looseleaf: .*{what}", errors, re.MULTILINE)) == 1, errors


def test_what_keeps_dying_ends_the_launch_and_is_named() -> None:
    served = Served()
    deadline = time.monotonic() + 120
    while served.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(services_of(served.process.pid)["gateway"], signal.SIGKILL)
        time.sleep(0.05)
    _, errors = served.process.communicate(timeout=120)
    assert served.process.returncode == 1
    assert errors.count("starting it again") == 5
    assert "gateway was killed by signal 9; its last lines:" in errors
    assert alive(list(served.services.values())) == []


def test_a_killed_launcher_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of `served`
    served = Served()
    assert len(list(tmp_path.glob("looseleaf-run-*"))) == 1
    served.process.kill()
    served.process.communicate(timeout=120)
    deadline = time.monotonic() + 60
    while alive(list(served.services.values())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(list(served.services.values())) == []

    def is_swept() -> bool:
        sweep(SHM)
        return not served.directories[0].exists()

    wait_for(is_swept, bool, 60.0, "the lock outlives the launcher's children")
    sweep(tmp_path)
    assert not list(tmp_path.glob("looseleaf-run-*"))


@pytest.fixture
def occupied() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def refused(*flags: str) -> str:
    """Returns the stderr of a `serve` that must not start."""
    with tempfile.TemporaryDirectory(dir=SHM) as directory:
        command = [sys.executable, "-m", "looseleaf", "serve", *FREE_PORTS, "--directory", directory, *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert list(Path(directory).iterdir()) == [], "it left something behind"
    assert done.returncode not in (0, None), done.stdout
    assert "says" not in done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def test_an_occupied_port(occupied: int) -> None:
    assert f"port {occupied} on 127.0.0.1" in refused("--port", str(occupied))
    assert f"port {occupied} on 127.0.0.1" in refused("--grpc-port", str(occupied))


def test_a_model_that_is_missing_or_broken(tmp_path: Path) -> None:
    assert f"{tmp_path}/none does not exist" in refused(f"{tmp_path}/none")
    model = shutil.copytree(tiny_checkpoint(cache_directory()), tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors" in refused(str(model))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"], "model_type": "bert"}))
    assert "BertModel" in refused(str(model))


def test_no_shared_memory(tmp_path: Path) -> None:
    assert "no shared memory" in refused("--directory", str(tmp_path / "none"))


def test_an_unreachable_redis() -> None:
    errors = refused("--redis-url", "redis://127.0.0.1:1/0")
    assert "redis" in errors.lower() and "127.0.0.1:1" in errors


def test_roles_that_cannot_be_paired_and_a_gpu_that_is_not_there() -> None:
    assert "--prefill 1 and --decode 2 must be equal" in refused("--roles", "both", "--decode", "2")
    if why_no_gpu() is not None:
        assert f"--device cuda: {why_no_gpu()}" in refused("--device", "cuda")


def test_two_models_and_mistyped_settings(tmp_path: Path) -> None:
    assert "two models" in refused("one", "--model", "two")
    assert "--prefil" in refused("--prefil", "2")
    command = [sys.executable, "-m", "looseleaf", "serve"]
    environment = os.environ | {"LOOSELEAF_SERVE_PREFIL": "2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "LOOSELEAF_SERVE_PREFIL" in done.stderr


def command_lines() -> str:
    """Returns the command lines of all processes on this machine."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(entry.read_bytes().decode(errors="replace"))
    return "\n".join(lines)


def test_no_key_is_in_a_command_line_and_a_changed_key_file_is_read_again(tmp_path: Path) -> None:
    secret, keys = secrets.token_hex(16), tmp_path / "keys"
    keys.write_text("a first\n")
    served = Served("--api-key-file", str(keys), f"--api-key={secret}")
    try:
        assert secret not in command_lines() and str(keys) in command_lines()

        def accepted(key: str) -> bool:
            with Client(served.grpc, api_key=key, timeout=60.0) as client, contextlib.suppress(Unauthenticated):
                return bool(client.generate([20], max_tokens=1).token_ids)
            return False

        assert accepted(secret) and accepted("first") and not accepted("second")
        keys.write_text("a second requests_per_minute=none\n")
        served.process.send_signal(signal.SIGHUP)
        time.sleep(1.0)
        assert accepted("first") and not accepted("second"), "there is something wrong with the file"
        keys.write_text("a second requests_per_minute=600\n")
        served.process.send_signal(signal.SIGHUP)
        wait_for(lambda: accepted("second"), bool, 60.0, "the file is not read again")
        assert not accepted("first") and accepted(secret)
    finally:
        status, errors = served.end(signal.SIGTERM)
    assert status == 0 and "the old keys stay in effect" in errors and "line 1: requests_per_minute" in errors
    assert secret not in errors
