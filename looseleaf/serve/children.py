"""Manages the launcher's child processes: starts them, forwards their logs, waits until they are ready, limits their
restarts, and ends them.

This module does not depend on which services the processes run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartupError
from common.telemetry import LogFormat, json_line
from looseleaf.serve.child import later

_POLL_S = 0.05
_TAIL_LINES = 20
_MAX_RESTARTS = 5
_RESTART_WINDOW_S = 60.0
Echo = Callable[[str], object]
"""A function that takes one log line."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """The specification of a process to start."""

    name: str
    """Unique name, which labels the process's log lines."""
    package: str
    flags: tuple[str, ...]
    environment: Mapping[str, str]
    inherited_fd: int
    """A descriptor that the process keeps open until it ends (the launcher's lock)."""
    log_format: LogFormat = "text"
    takes_orders: bool = False
    """Whether the process reads from stdin which process it is to replace (`Child.become`)."""


class ChildDied(StartupError):
    """The error for a service that has ended unexpectedly."""


class Restarts:
    """A counter of each service's restarts. A service that ends more than `_MAX_RESTARTS` times in `_RESTART_WINDOW_S`
    seconds is not restarted.
    """

    def __init__(self) -> None:
        self._moments: dict[str, list[float]] = {}

    def allow(self, name: str) -> bool:
        """Returns whether `name` may be started again now, and counts the restart."""
        now = time.monotonic()
        recent = [at for at in self._moments.get(name, ()) if now - at < _RESTART_WINDOW_S]
        self._moments[name] = [*recent, now]
        return len(recent) < _MAX_RESTARTS


class Child:
    """A running service in a separate session, so that a terminal's Ctrl-C reaches only the launcher."""

    def __init__(self, spec: ServiceSpec, directory: Path, echo: Echo) -> None:
        """Starts the service. Its ready file is in `directory`."""
        self.spec = spec
        self.name = spec.name
        self._ready_file = _ready_file(directory, spec)
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        command = [sys.executable, "-m", "looseleaf.serve.child", str(os.getpid()), spec.package, *spec.flags]
        self._process = subprocess.Popen(
            [*command, "--ready-file", str(self._ready_file)],
            stdin=subprocess.PIPE if spec.takes_orders else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(spec.environment),
            start_new_session=True,
            pass_fds=(spec.inherited_fd,),
        )
        self._reader = threading.Thread(target=self._forward, args=(echo,), name=f"log-{spec.name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def later(self, line: int) -> str:
        """Returns a flag for another service, which replaces the flag by a line of this child's ready file once the
        file exists.
        """
        return later(self._ready_file, line)

    @property
    def status(self) -> int | None:
        """The exit status, negative if a signal ended the service, or None while the service runs."""
        return self._process.poll()

    def become(self, spec: ServiceSpec) -> bool:
        """Makes the child replace the process of `spec`. The child then uses the name and the ready file of that
        process. Returns False if the child has ended.
        """
        assert self._process.stdin is not None
        ready_file = _ready_file(self._ready_file.parent, spec)
        line = json.dumps([spec.package, [*spec.flags, "--ready-file", str(ready_file)]])
        before = self.spec, self.name, self._ready_file
        self.spec, self.name, self._ready_file = spec, spec.name, ready_file  # first, because the child logs at once
        try:
            with self._process.stdin as orders:
                orders.write(line.encode() + b"\n")
        except OSError:
            self.spec, self.name, self._ready_file = before
            return False
        return True

    def _forward(self, echo: Echo) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._tail.append(line)
            with contextlib.suppress(OSError):  # nobody reads the log; a full pipe would block the service
                echo(labelled(self.name, line, self.spec.log_format))

    def check(self) -> None:
        """Checks that the child is still running. Raises ChildDied, with the last log lines, if the child has ended."""
        status = self._process.poll()
        if status is None:
            return
        self._reader.join(timeout=1.0)  # its last lines
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        last = "\n".join(f"    {line}" for line in self._tail) or "    (it logged nothing)"
        raise ChildDied(f"{self.name} {how}; its last lines:\n{last}")

    def ready_lines(self) -> tuple[str, ...] | None:
        """Returns the lines of the child's ready file, or None if the child is not ready yet."""
        try:
            return tuple(self._ready_file.read_text(encoding="utf-8").split())
        except FileNotFoundError:
            return None

    def terminate(self) -> None:
        """Asks the service to end (SIGTERM)."""
        self._process.terminate()

    def hang_up(self) -> None:
        """Asks the service to read its files again (SIGHUP)."""
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Ends the service at once (SIGKILL)."""
        self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Returns whether the service ends within `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, seconds))
        return self._process.poll() is not None


def labelled(name: str, line: str, log_format: LogFormat) -> str:
    """Returns a service's line with its name. In JSON, the name is added to the line's object. A line that is not a
    JSON object, such as a line of a traceback or of Redis, becomes the message of a new object.
    """
    if log_format == "text":
        return f"{name:<11} | {line}"
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return json.dumps({**event, "process": name}) if isinstance(event, dict) else own_line(line, log_format, name)


def own_line(line: str, log_format: LogFormat, name: str = "looseleaf") -> str:
    """Returns a plain line in the format of the log. In JSON, the line becomes the message of an object with the level
    info.
    """
    return line if log_format == "text" else json_line(name, line, time.time(), "info")


def _ready_file(directory: Path, spec: ServiceSpec) -> Path:
    """Returns the path of the file with which a service reports that it is ready. Removes the predecessor's file."""
    file = directory / f"{spec.name}.ready"
    file.unlink(missing_ok=True)
    return file


def wait_ready(waited: Sequence[Child], all_children: Sequence[Child], seconds: float) -> list[tuple[str, ...]]:
    """Returns the ready lines of `waited`, in order, when all of them exist.

    Raises ChildDied as soon as any of `all_children` ends, and StartupError after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        for child in all_children:
            child.check()
        lines = [child.ready_lines() for child in waited]
        ready = [item for item in lines if item is not None]
        if len(ready) == len(waited):
            return ready
        if time.monotonic() > deadline:
            late = ", ".join(child.name for child, item in zip(waited, lines, strict=True) if item is None)
            raise StartupError(f"not ready after {seconds:.0f} s: {late}")
        time.sleep(_POLL_S)


def end(children: Sequence[Child], grace_s: float) -> None:
    """Sends SIGTERM to all children and, after `grace_s` seconds, SIGKILL to those that are still running. Waits until
    they have ended, but only briefly after SIGKILL.
    """
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        if not child.wait(deadline - time.monotonic()):
            child.kill()
            child.wait(5.0)
