"""Runs a whole stack under test (Redis and the service processes), records its log lines, and disturbs it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from block_store.arena.arena import Arena
from block_store.ledger.inspection import HolderView, Inspection, inspect
from block_store.ledger.scripts import LedgerScripts
from common.types import Epoch
from looseleaf import metrics_page
from looseleaf.llm import serve_settings
from looseleaf.serve.children import Child, wait_ready
from looseleaf.serve.launcher import Addresses, Launcher
from looseleaf.serve.supervisor import Supervisor
from testing.chaos.redis_process import RedisProcess
from testing.system import wait_for

BACK_S = 180.0
"""The maximum time in seconds for a service to restart, with a large margin for loaded machines."""
EXIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a service's log, with the time at which it was read."""

    at: float
    service: str
    text: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a scenario's stack."""

    num_blocks: int = 4096
    max_model_len: int = 512
    max_num_seqs: int = 64
    block_size: int = 16
    workers: int = 2
    """The number of workers of each role."""
    packages: Mapping[str, str] | None = None
    """Replacements for the services' entry points, by original name."""
    variables: Mapping[str, str] | None = None
    """Environment variables for all services."""
    preemption: Literal["auto", "swap", "give-back"] | None = None
    """The preemption mode, or None for the decode worker's default."""
    spare: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of `LLM`."""


class Stack:
    """A running stack. It starts at construction and ends with `close`."""

    def __init__(self, model: Path, plan: Plan) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="looseleaf-chaos-")
        self._lines: list[Line] = []
        self.redis = RedisProcess(Path(self._scratch.name))
        try:
            self.launcher = _Launcher(model, plan, self.redis.url, self._take)
            self.addresses: Addresses = self.launcher.start()
        except BaseException:
            self.redis.close()
            raise
        self._supervisor = Supervisor(self.launcher)
        self._supervisor.start()
        self.arena = Arena.open(self.launcher.directory)

    # --- observation

    @property
    def failure(self) -> str | None:
        """The reason why the launch failed, or None if it has not failed."""
        return None if self._supervisor.failure is None else str(self._supervisor.failure)

    def _take(self, line: str) -> None:
        service, _, text = line.partition("|")
        self._lines.append(Line(time.monotonic(), service.strip(), text.strip()))

    def lines(self, pattern: str, *, service: str = "", since: float = 0.0) -> list[tuple[Line, re.Match[str]]]:
        """Returns the matching log lines of services whose name begins with `service`, with their matches. `since` is a
        `time.monotonic()` value.
        """
        found = re.compile(pattern)
        return [
            (line, match)
            for line in list(self._lines)
            if line.at >= since and line.service.startswith(service) and (match := found.search(line.text))
        ]

    def tail(self, num_lines: int = 40) -> list[Line]:
        return self._lines[-num_lines:]

    def metric(self, name: str, **labels: str) -> float:
        """Returns the current sum of the gateway's samples with this name and these labels."""
        return metrics_page.total(metrics_page.read(self.addresses.http), name, **labels)

    def ledger(self) -> LedgerScripts:
        """Returns the ledger that the arena's header names now."""
        return LedgerScripts.attach(self.redis.client, self.arena)

    def inspect(self) -> Inspection:
        return inspect(self.ledger(), with_blocks=True)

    def holder(self, name: str, *, with_blocks: bool = False) -> HolderView:
        """Returns the newest incarnation of a worker. Raises KeyError if the ledger has none."""
        found = [holder for holder in inspect(self.ledger(), with_blocks).holders if holder.name == name]
        if not found:
            raise KeyError(name)
        return max(found, key=lambda holder: holder.epoch)

    # --- disturbances

    @property
    def pids(self) -> dict[str, int]:
        return self.launcher.pids

    def kill(self, name: str) -> float:
        """Sends SIGKILL to a service. Returns the time of the signal (`time.monotonic()`)."""
        return self._send(name, signal.SIGKILL)

    def kill_all(self) -> None:
        """Ends restarts, and sends SIGKILL to Redis and to every service. The arena file remains until `close`."""
        self._supervisor.end()
        self.launcher.kill()
        self.redis.kill()

    def freeze(self, name: str) -> float:
        return self._send(name, signal.SIGSTOP)

    def thaw(self, name: str) -> float:
        return self._send(name, signal.SIGCONT)

    def _send(self, name: str, number: signal.Signals) -> float:
        moment = time.monotonic()
        os.kill(self.pids[name], number)
        return moment

    def wait_back(self, name: str, old_pid: int, old_epoch: Epoch, timeout_s: float = BACK_S) -> None:
        """Waits until a successor of the process `old_pid` is registered, ready and in use. Raises AssertionError if
        one of these takes longer than `timeout_s`.
        """
        wait_for(lambda: self.pids[name], lambda pid: pid != old_pid, timeout_s, f"{name} is not started again")
        self.wait_registered(name, old_epoch, timeout_s)
        wait_for(lambda: self.launcher.is_ready(name), bool, timeout_s, f"{name} does not become ready")
        self.wait_used(name, timeout_s)

    def wait_registered(self, name: str, after: Epoch, timeout_s: float = BACK_S) -> None:
        """Waits until the ledger has an incarnation of the worker later than `after`. Raises AssertionError after
        `timeout_s`.
        """

        def newest() -> int:
            with contextlib.suppress(KeyError):
                return int(self.holder(name).epoch)
            return -1

        wait_for(newest, lambda epoch: epoch > after, timeout_s, f"{name} does not register again")

    def wait_used(self, name: str, timeout_s: float = BACK_S) -> None:
        """Waits until the gateway sends the worker a request. Call this during traffic. Raises AssertionError after
        `timeout_s`.
        """
        before = self.metric("looseleaf_worker_requests_total", worker=name)
        wait_for(
            lambda: self.metric("looseleaf_worker_requests_total", worker=name), lambda n: n > before, timeout_s,
            f"{name} gets no requests",
        )  # fmt: skip

    # --- shutdown

    def close(self) -> None:
        self._supervisor.end()
        for pid in self.pids.values():  # so that no process stays frozen
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.launcher.stop()
        self.redis.close()
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            print(f"the launch: {self.failure or 'no failure'}; its last log lines:", file=sys.stderr)
            for line in self.tail():
                print(f"  {line.service}: {line.text}", file=sys.stderr)
        self.close()


class _Launcher(Launcher):
    """A launcher that starts services with the entry points and the variables of a plan. The gateway and the block
    store keep their ports when they restart.
    """

    def __init__(self, model: Path, plan: Plan, redis_url: str, echo: Any) -> None:
        self._ports = iter(free_ports(3))
        settings = serve_settings(
            str(model),
            {
                "redis_url": redis_url,
                "num_blocks": plan.num_blocks,
                "max_model_len": plan.max_model_len,
                "prefill": plan.workers,
                "decode": plan.workers,
                "roles": "split",
                "threads": 1,
                "preemption": plan.preemption,
                "spare": plan.spare,
                "max_num_seqs": plan.max_num_seqs,
                "block_size": plan.block_size,
                "port": next(self._ports),
                "grpc_port": next(self._ports),
                **plan.settings,
            },
        )
        super().__init__(settings, echo)
        self._plan = plan
        self._changing = threading.RLock()

    @property
    def directory(self) -> Path:
        """The directory of the arena."""
        assert self._shared is not None
        return self._shared.path

    def is_ready(self, name: str) -> bool:
        return self._named(name).ready_lines() is not None

    def check(self) -> None:
        with self._changing:
            super().check()

    def replace(self, name: str, *, overlap: bool) -> int:
        """Ends a service with SIGTERM and starts it again. With `overlap`, the new process is ready before the old one
        gets SIGTERM. Returns the exit status of the old process when the new process is ready.
        """
        with self._changing:
            old = self._named(name)
            index = self._children.index(old)
            if overlap:
                new = self._child(old.spec)
                wait_ready([new], [new], BACK_S)
                old.terminate()
                ended = old.wait(EXIT_S)
            else:
                old.terminate()
                ended = old.wait(EXIT_S)
                new = self._child(old.spec)
            self._children[index] = new
        assert ended, f"{name} did not end within {EXIT_S:.0f} s of SIGTERM"
        wait_ready([new], [new], BACK_S)
        status = old.status
        assert status is not None
        return status

    def _named(self, name: str) -> Child:
        return next(child for child in self._children if child.name == name)

    def _spawn(self, name: str, package: str, flags: Sequence[str], extra: Mapping[str, str] | None = None) -> Child:
        entry = (self._plan.packages or {}).get(package, package)
        if name == "block_store":
            at = list(flags).index("--port") + 1
            flags = [*flags[:at], str(next(self._ports)), *flags[at + 1 :]]
        return super()._spawn(name, entry, flags, {**(self._plan.variables or {}), **(extra or {})})


def free_ports(count: int) -> list[int]:
    """Returns ports on which nothing listens now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
