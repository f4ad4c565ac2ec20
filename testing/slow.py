"""Runs a command as on a slow and busy machine. By default, the command gets half a core, and is interrupted by pauses
of 1 to 3 s, in which all its processes or one of them are stopped. Tests that depend on the speed of the machine are
likely to fail.

    python -m testing.slow -- .venv/bin/python -m pytest tests/worker

The program needs root, and cgroups of version 1 with the controllers `cpu` and `freezer`. A frozen cgroup, unlike
SIGSTOP, does not interfere with tests that stop and continue their own processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 50_000
POLL_S = 0.05


class Cgroup:
    """A new cgroup of one controller."""

    def __init__(self, controller: str, name: str) -> None:
        """Creates the cgroup. Raises OSError if the controller is not there or may not be used."""
        self._parent = ROOT / controller
        self._path = self._parent / name
        self._path.mkdir()

    def write(self, file: str, value: object) -> None:
        (self._path / file).write_text(str(value))

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self._path / "cgroup.procs").read_text().split()]

    def take(self, pid: int) -> None:
        """Moves a process into the cgroup. Does nothing if the process has ended."""
        with contextlib.suppress(OSError):
            self.write("cgroup.procs", pid)

    def remove(self) -> None:
        """Moves the processes that are left to the parent, and removes the cgroup."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                (self._parent / "cgroup.procs").write_text(str(pid))
        self._path.rmdir()


class SlowMachine:
    """The cgroups of one command."""

    def __init__(self, cpus: float, rng: random.Random) -> None:
        """Creates the cgroups. `cpus` is the number of cores that all processes of the command share, such as 0.5."""
        name = f"looseleaf-slow-{os.getpid()}"
        self._cpu, self._all, self._one = Cgroup("cpu", name), Cgroup("freezer", name), Cgroup("freezer", name + "-one")
        self._cpu.write("cpu.cfs_period_us", PERIOD_US)
        self._cpu.write("cpu.cfs_quota_us", round(PERIOD_US * cpus))
        self.rng = rng
        self.num_pauses = 0

    def enter(self) -> None:
        """Moves this process into the cgroups. Processes that it starts will be there too."""
        for group in (self._cpu, self._all):
            group.write("cgroup.procs", os.getpid())

    def pause(self, shortest_s: float, longest_s: float) -> None:
        """Pauses one process or, with the same probability, all of them, for a random time."""
        self.num_pauses += 1
        seconds, group, pids = self.rng.uniform(shortest_s, longest_s), self._all, self._all.pids()
        if pids and self.rng.random() < 0.5:
            group = self._one
            group.take(self.rng.choice(pids))
        group.write("freezer.state", "FROZEN")
        time.sleep(seconds)
        group.write("freezer.state", "THAWED")
        for pid in self._one.pids():
            self._all.take(pid)

    def close(self, *, kill: bool = False) -> None:
        """Thaws the processes and removes the cgroups. If `kill` is True, ends the processes."""
        for group in (self._all, self._one):
            group.write("freezer.state", "THAWED")
        for pid in self._cpu.pids() if kill else ():
            os.kill(pid, signal.SIGKILL)
        for group in (self._one, self._all, self._cpu):
            group.remove()


def run(command: Sequence[str], machine: SlowMachine, every_s: float, pauses_s: tuple[float, float]) -> int:
    """Runs the command, with `every_s` seconds between two pauses on average. Returns the command's exit status."""
    process = subprocess.Popen(command, preexec_fn=machine.enter)
    try:
        while process.poll() is None:
            ends = time.monotonic() + machine.rng.expovariate(1 / every_s)
            while process.poll() is None and time.monotonic() < ends:
                time.sleep(POLL_S)
            if process.poll() is None:
                machine.pause(*pauses_s)
    finally:
        machine.close(kill=process.poll() is None)
    return process.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m testing.slow", description=__doc__)
    parser.add_argument("--cpus", type=float, default=0.5, help="cores that the command's processes share")
    parser.add_argument("--every", type=float, default=6.0, help="mean time between two pauses, in seconds")
    parser.add_argument("--pauses", type=float, nargs=2, default=(1.0, 3.0), help="shortest and longest pause")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    try:
        machine = SlowMachine(given.cpus, random.Random(given.seed))
    except OSError as error:
        print(f"testing.slow: cgroups of version 1 cannot be used: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    status = run(given.command, machine, given.every, tuple(given.pauses))
    print(f"testing.slow: {machine.num_pauses} pauses", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
