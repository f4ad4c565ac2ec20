"""Fair locks have one holder at a time, and do not pass over a waiter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from testing.system import wait_for
from worker.fair_lock import FairFileLock, FairLock

ROOT = Path(__file__).resolve().parents[2]


def test_one_at_a_time() -> None:
    turns, inside, most = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(500):
            with turns:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == 1 and inside == 0


def test_who_waits_comes_before_who_was_just_served() -> None:
    """The holder ends its turn and immediately asks for another turn. The waiting thread is first."""
    turns, order = FairLock(), []
    waiting = threading.Event()

    def other() -> None:
        waiting.set()
        with turns:
            order.append("other")

    thread = threading.Thread(target=other)
    with turns:
        thread.start()
        waiting.wait()
        deadline = time.monotonic() + 10
        while turns.num_waiting == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
    with turns:
        order.append("holder")
    thread.join(10)
    assert order == ["other", "holder"]


def test_an_error_gives_the_turn_back() -> None:
    turns = FairLock()
    for _ in range(2):
        try:
            with turns:
                raise ValueError
        except ValueError:
            pass
    with turns:
        assert turns.num_waiting == 0


STEPPING = """
import sys, time
from pathlib import Path
from worker.fair_lock import FairFileLock
turns = FairFileLock(Path(sys.argv[1]))
while True:
    with turns:
        print(time.monotonic(), flush=True)
        time.sleep(0.02)
        print(time.monotonic(), flush=True)
"""


@pytest.fixture
def stepping(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Returns a function that starts processes, which run steps of 20 ms as often as possible and print when each step
    began and ended.
    """
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", STEPPING, str(tmp_path / "turns")]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_processes_step_one_at_a_time_and_by_turns(stepping: Callable[[], subprocess.Popen[str]]) -> None:
    processes = [stepping(), stepping()]
    time.sleep(1.5)
    killed = time.monotonic()
    for process in processes:
        process.kill()
    steps: list[tuple[float, float, int]] = []
    for which, process in enumerate(processes):
        times = [float(line) for line in process.communicate()[0].splitlines()][1:]  # from the first step's end
        steps += [(begin, end, which) for begin, end in zip(times[::2], times[1::2], strict=False)]
    steps.sort()
    both = [step for step in steps if killed - 1.2 < step[0] < killed - 0.1]  # the last one to die may step once more
    assert len(both) > 20
    assert all(one[1] <= other[0] for one, other in pairwise(both))
    assert all(one[2] != other[2] for one, other in pairwise(both))


def test_the_turn_of_a_dead_process_is_free(stepping: Callable[[], subprocess.Popen[str]], tmp_path: Path) -> None:
    other, turns = stepping(), FairFileLock(tmp_path / "turns")
    other.kill()
    began = time.monotonic()
    with turns:
        assert time.monotonic() - began < 1.0 and not turns.fallbacks.counts


def test_a_frozen_process_is_waited_for_once(stepping: Callable[[], subprocess.Popen[str]], tmp_path: Path) -> None:
    other, turns = stepping(), FairFileLock(tmp_path / "turns", patience_s=0.3)
    while True:
        os.kill(other.pid, signal.SIGSTOP)
        if holds(tmp_path / "turns", other.pid):
            break
        os.kill(other.pid, signal.SIGCONT)
    waits = []
    for _ in range(3):
        began = time.monotonic()
        with turns:
            waits.append(time.monotonic() - began)
    assert waits[0] >= 0.3 > 0.1 > waits[1] and turns.fallbacks.counts == {"turn": 3}
    os.kill(other.pid, signal.SIGCONT)
    wait_for(lambda: is_in_turn(turns), bool, 10.0, "it has no turn any more")
    for _ in range(20):  # waits for the other process each time, which steps continuously
        assert is_in_turn(turns)


def is_in_turn(turns: FairFileLock) -> bool:
    before = dict(turns.fallbacks.counts)
    with turns:
        return turns.fallbacks.counts == before


def holds(path: Path, pid: int) -> bool:
    """Returns whether the process has locked the file's first byte."""
    inode, locks = path.stat().st_ino, Path("/proc/locks").read_text().splitlines()
    found = [line.split() for line in locks if line.split()[5].endswith(f":{inode}")]
    return any(fields[4] == str(pid) and fields[6] == "0" for fields in found)
