"""Measures the CPU time per streamed token of the gateway and of the decode service's RPC front end
(`make bench-frontend`).

Uses real processes and sockets for the clients, the gateway, Redis and a decode service. The decode service's step loop
and the prefill service are replaced by code that computes nothing (`frontend_worker`). Steps run at a fixed rate, and
each step adds one token to every stream. The CPU time that a process uses without streams is subtracted, and so is the
step loop's. For comparison, the same run measures servers that only send (`frontend_floor`), which shows the cost of
grpc.aio and uvicorn. CPU time comes from the kernel (schedstat), so it does not include waiting. On a busy machine,
caches are cold and the results are higher.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import Field

from block_store.redis.redis_server import connect
from common.errors import StartupError
from common.settings import Settings, settings_config
from looseleaf import metrics_page
from looseleaf.serve.model_source import resolve

KINDS = ("grpc", "http")
START_S = 120.0
SETTLE_S = 0.7
_TICKS = os.sysconf("SC_CLK_TCK")


class FrontendSettings(Settings):
    """The settings of the front end benchmark."""

    model_config = settings_config("LOOSELEAF_FRONTEND_", "bench.served.frontend")

    model: str | None = Field(None, description="directory with the tokenizer; default: the built-in model")
    streams: int = Field(64, ge=1, le=1024, description="concurrent streams")
    rate: float = Field(25.0, gt=0, le=2000, description="steps per second, each a token for every stream")
    full_rate: float = Field(
        1000.0, ge=0, le=5000, description="steps per second that no gateway keeps up with; 0: skip"
    )
    seconds: float = Field(4.0, gt=0.1, description="length of one measurement")
    rounds: int = Field(3, ge=1, description="measurements of each; the median is printed")


class Helper:
    """A process of this benchmark that answers each line of its input with a line of JSON. It ends when its input
    ends.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"bench.served.{module}", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def read(self) -> str:
        """Returns the next line of the process's output. Raises StartupError if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StartupError(f"{self._process.args!r} has ended; its message is above")
        return line

    def ask(self, line: str = "mark") -> dict[str, int]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self.read())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(START_S)


@dataclass(frozen=True, slots=True)
class Cpu:
    """A reading of the CPU time that a process has used. User and kernel time are in clock ticks."""

    total_ns: int
    user_ticks: int
    kernel_ticks: int

    @classmethod
    def of(cls, pid: int) -> Cpu:
        total = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return cls(total, int(fields[11]), int(fields[12]))


@dataclass(frozen=True, slots=True)
class Use:
    """The CPU time that a process uses for streams. `kernel_share` is the kernel's share of the process's CPU time
    during the measurement.
    """

    us_per_token: float
    kernel_share: float


def watch(pid: int, seconds: float) -> tuple[Cpu, Cpu, float]:
    """Waits for `seconds`. Returns a process's CPU time before and after the wait, and the elapsed seconds."""
    before, began = Cpu.of(pid), time.monotonic()
    time.sleep(seconds)
    return before, Cpu.of(pid), time.monotonic() - began


def use_of(spent: tuple[Cpu, Cpu, float], idle_share: float, num_tokens: float, not_ours_ns: float = 0.0) -> Use:
    """Returns the CPU time that streams used between two readings. `idle_share` is the number of cores that the process
    uses without streams, and `not_ours_ns` is further CPU time to subtract.
    """
    before, after, passed_s = spent
    took_ns = after.total_ns - before.total_ns - not_ours_ns - idle_share * passed_s * 1e9
    user, kernel = after.user_ticks - before.user_ticks, after.kernel_ticks - before.kernel_ticks
    return Use(took_ns / 1000 / max(1.0, num_tokens), kernel / max(1, user + kernel))


def gateway_command(model: str, redis_url: str, ready: Path) -> list[str]:
    ports = ["--host", "127.0.0.1", "--port", "0", "--grpc-port", "0"]
    patience = ["--silence-s", "60", "--stall-s", "600", "--drain-s", "1", "--max-queue", "2048"]
    files = ["--model", model, "--redis-url", redis_url, "--ready-file", str(ready)]
    return [sys.executable, "-m", "looseleaf.serve.child", str(os.getpid()), "gateway", *files, *ports, *patience]


def wait_for(ready: Path, process: subprocess.Popen[bytes]) -> list[str]:
    """Returns the words in a ready file when it exists. Raises StartupError if the process ends first or takes too
    long.
    """
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None:
            raise StartupError("the gateway has ended; its message is above")
        if time.monotonic() > deadline:
            raise StartupError(f"the gateway is not ready after {START_S:.0f} s")
        time.sleep(0.05)
    return ready.read_text(encoding="utf-8").split()


class Stack:
    """A running stack of Redis, the workers, the gateway and the comparison servers. `with` starts and stops it."""

    def __init__(self, settings: FrontendSettings) -> None:
        self._settings = settings
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._start(self._exits)
        except BaseException:
            self._exits.close()
            raise
        return self

    def _start(self, exits: ExitStack) -> None:
        settings = self._settings
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="looseleaf-bench-")))
        redis = connect(None, directory)
        exits.callback(redis.close)
        model = str(resolve(settings.model).directory)
        self.worker = exits.enter_context(Helper("frontend_worker", redis.url, model))
        self.worker.ask(f"rate {settings.rate}")
        self.floor = exits.enter_context(Helper("frontend_floor"))
        self.floor_addresses = dict(zip(("http", "grpc"), self.floor.read().split(), strict=True))
        ready = directory / "gateway.ready"
        self.gateway = subprocess.Popen(gateway_command(model, redis.url, ready))
        exits.callback(self.gateway.wait, START_S)
        exits.callback(self.gateway.terminate)
        self.addresses = dict(zip(("http", "grpc"), wait_for(ready, self.gateway), strict=True))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.close()

    def tokens_out(self) -> float:
        """Returns the number of tokens that the gateway has sent."""
        return metrics_page.total(metrics_page.read(self.addresses["http"]), "looseleaf_generation_tokens_total")

    def clients(self, kind: str, address: str) -> Helper:
        """Starts the clients. Returns them shortly after all streams have begun. Raises StartupError if this takes
        longer than START_S seconds.
        """
        clients = Helper("frontend_clients", kind, address, str(self._settings.streams))
        deadline = time.monotonic() + START_S
        while clients.ask()["begun"] < self._settings.streams:
            if time.monotonic() > deadline:
                raise StartupError(f"the {kind} streams have not begun after {START_S:.0f} s")
            time.sleep(0.05)
        time.sleep(SETTLE_S)
        return clients


@dataclass(slots=True)
class Idle:
    """The CPU use of each process without streams, in cores."""

    gateway: float = 0.0
    worker: float = 0.0
    floor: float = 0.0


class Measurement:
    """The measurements of a running stack."""

    def __init__(self, stack: Stack, settings: FrontendSettings) -> None:
        self._stack = stack
        self._settings = settings
        self._idle = Idle()

    def measure_idle(self) -> None:
        stack = self._stack
        pids = {"gateway": stack.gateway.pid, "worker": stack.worker.pid, "floor": stack.floor.pid}
        time.sleep(min(2.0, self._settings.seconds))  # waits for the rest of the start-up work
        before, began = {name: Cpu.of(pid) for name, pid in pids.items()}, time.monotonic()
        time.sleep(min(2.0, self._settings.seconds))
        passed_ns = (time.monotonic() - began) * 1e9
        for name, pid in pids.items():
            setattr(self._idle, name, (Cpu.of(pid).total_ns - before[name].total_ns) / passed_ns)

    def served(self, kind: str, rate: float) -> dict[str, Any]:
        """Measures the gateway and the decode service's front end with streams of `kind`."""
        stack, settings = self._stack, self._settings
        stack.worker.ask(f"rate {rate}")
        with stack.clients(kind, stack.addresses[kind]) as clients:
            tokens, counts, messages = stack.tokens_out(), stack.worker.ask(), clients.ask()["messages"]
            decode_before = Cpu.of(stack.worker.pid)
            spent = watch(stack.gateway.pid, settings.seconds)
            decode = (decode_before, Cpu.of(stack.worker.pid), spent[2])
            after, num_tokens = stack.worker.ask(), stack.tokens_out() - tokens
            messages = clients.ask()["messages"] - messages
        made, own_ns = after["num_tokens"] - counts["num_tokens"], after["own_ns"] - counts["own_ns"]
        return {
            "gateway": asdict(use_of(spent, self._idle.gateway, num_tokens)),
            "decode": asdict(use_of(decode, self._idle.worker, made, own_ns)),
            "tokens_per_s": num_tokens / spent[2],
            "tokens_per_message": num_tokens / max(1, messages),
            "gateway_cores": (spent[1].total_ns - spent[0].total_ns) / spent[2] / 1e9,
        }

    def floor(self, kind: str) -> dict[str, Any]:
        """Measures a server that only sends messages, at `settings.rate` messages per second and stream."""
        stack = self._stack
        stack.floor.ask(f"rate {self._settings.rate}")
        with stack.clients(kind, stack.floor_addresses[kind]) as clients:
            before = clients.ask()["messages"]
            spent = watch(stack.floor.pid, self._settings.seconds)
            messages = clients.ask()["messages"] - before
        return asdict(use_of(spent, self._idle.floor, messages))


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median of each number over `rounds`, which have the same keys. Values may be nested dicts."""
    first = rounds[0]
    return {
        name: medians([r[name] for r in rounds])
        if isinstance(value, dict)
        else round(statistics.median(r[name] for r in rounds), 3)
        for name, value in first.items()
    }


def measure(settings: FrontendSettings) -> dict[str, Any]:
    found: dict[str, Any] = {"benchmark": "frontend", "streams": settings.streams, "steps_per_s": settings.rate}
    with Stack(settings) as stack:
        measurement = Measurement(stack, settings)
        measurement.measure_idle()
        tasks: dict[str, Callable[[], dict[str, Any]]] = {}
        for kind in KINDS:
            tasks[kind] = lambda kind=kind: measurement.served(kind, settings.rate)  # type: ignore[misc]
            tasks[f"{kind}_floor"] = lambda kind=kind: measurement.floor(kind)  # type: ignore[misc]
            if settings.full_rate:
                tasks[f"{kind}_full"] = lambda kind=kind: measurement.served(kind, settings.full_rate)  # type: ignore[misc]
        rounds = [{name: task() for name, task in tasks.items()} for _ in range(settings.rounds)]
    return found | {name: medians([r[name] for r in rounds]) for name in tasks}


def show(found: dict[str, Any]) -> None:
    print(f"{found['streams']} streams, {found['steps_per_s']:g} steps a second; us of CPU per token (in the kernel)")
    for kind in KINDS:
        served, floor = found[kind], found[f"{kind}_floor"]
        gateway, decode = served["gateway"], served["decode"]
        print(
            f"{kind}  gateway {gateway['us_per_token']:6.1f} ({gateway['kernel_share']:.0%}), "
            f"{served['tokens_per_message']:.2f} tokens a message, "
            f"a server that only sends {floor['us_per_token']:.1f} ({floor['kernel_share']:.0%}) a message; "
            f"decode front end {decode['us_per_token']:.1f}"
        )
        if full := found.get(f"{kind}_full"):
            print(
                f"      full load: {full['tokens_per_s']:.0f} tokens/s, gateway {full['gateway']['us_per_token']:.1f}, "
                f"{full['tokens_per_message']:.1f} tokens a message, decode {full['decode']['us_per_token']:.1f}"
            )


def main(settings: FrontendSettings) -> None:
    found = measure(settings)
    show(found)
    print(json.dumps(found | {"machine": platform.processor() or platform.machine()}))


if __name__ == "__main__":
    try:
        main(FrontendSettings.load(sys.argv[1:]))
    except StartupError as error:
        print(f"bench.served.frontend: {error}", file=sys.stderr)
        sys.exit(1)
