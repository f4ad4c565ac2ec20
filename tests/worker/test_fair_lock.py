"""Fair locks have one holder at a time, and do not pass over a waiter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from testing.system import wait_for
from worker import fair_lock
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
        thread.join(60)
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
        deadline = time.monotonic() + 60
        while turns.num_waiting == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
    with turns:
        order.append("holder")
    thread.join(60)
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
turns = FairFileLock(Path(sys.argv[1]), patience_s=60.0)
while True:
    with turns:
        print(time.monotonic(), flush=True)
        time.sleep(0.02)
        print(time.monotonic(), flush=True)
"""


WORKING = """
import sys
from pathlib import Path
from worker.fair_lock import FairFileLock
turns = FairFileLock(Path(sys.argv[1]))
for line in sys.stdin:
    turns.note_work(bool(int(line)))
    print(turns.others_have_work, flush=True)
"""

Stepping = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def stepping(tmp_path: Path) -> Iterator[Stepping]:
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


def test_processes_step_one_at_a_time_and_by_turns(stepping: Stepping) -> None:
    processes = [stepping(), stepping()]
    first, second = (process.stdout for process in processes)
    assert first is not None and second is not None
    told: list[list[float]] = [[], [float(second.readline()) for _ in range(121)]]
    while sum(at > told[1][0] for at in told[0]) < 121:  # so that each makes 60 steps beside the other
        told[0].append(float(first.readline()))
    for process in processes:
        process.kill()
    steps: list[tuple[float, float, int]] = []
    for which, (times, output) in enumerate(zip(told, (first, second), strict=True)):
        times += [float(line) for line in output.readlines() if line.endswith("\n")]
        steps += [(begin, end, which) for begin, end in zip(times[1::2], times[2::2], strict=False)]
    steps.sort()
    assert all(one[1] <= other[0] for one, other in pairwise(steps))
    begins = [next(i for i, step in enumerate(steps) if step[2] == which) for which in range(2)]
    ends = [max(i for i, step in enumerate(steps) if step[2] == which) for which in range(2)]
    both = [which for _, _, which in steps[max(begins) : min(ends)]]
    turns = [len(list(steps)) for _, steps in groupby(both)]
    assert len(turns) > 60
    assert turns.count(1) > 0.8 * len(turns), "a process that did not run at its turn is passed over"


def test_the_turn_of_a_dead_process_is_free(stepping: Stepping, tmp_path: Path) -> None:
    other, turns = stepping(), FairFileLock(tmp_path / "turns", patience_s=60.0)
    other.kill()
    with turns:
        assert not turns.fallbacks.counts


def test_a_frozen_process_is_waited_for_once(stepping: Stepping, tmp_path: Path) -> None:
    other, turns = stepping(), FairFileLock(tmp_path / "turns", patience_s=0.3)
    while True:
        os.kill(other.pid, signal.SIGSTOP)
        if holds(tmp_path / "turns", other.pid):
            break
        os.kill(other.pid, signal.SIGCONT)
    waits = []
    for _ in range(10):
        began = time.monotonic()
        with turns:
            waits.append(time.monotonic() - began)
    assert waits[0] >= 0.3 > 0.1 > min(waits[1:]) and turns.fallbacks.counts == {"turn": 10}
    turns._patience_s = 60.0
    os.kill(other.pid, signal.SIGCONT)
    wait_for(lambda: is_in_turn(turns), bool, 60.0, "it has no turn any more")
    for _ in range(20):  # waits for the other process each time, which steps continuously
        assert is_in_turn(turns)


def test_a_long_step_is_waited_for_once() -> None:
    turns, has_turn, go_on = FairLock(patience_s=0.3), threading.Event(), threading.Event()

    def long_step() -> None:
        with turns:
            has_turn.set()
            go_on.wait(60)

    thread = threading.Thread(target=long_step)
    thread.start()
    assert has_turn.wait(60)
    waits = []
    for _ in range(10):
        began = time.monotonic()
        with turns:
            waits.append(time.monotonic() - began)
    assert waits[0] >= 0.3 > 0.1 > min(waits[1:]) and turns.fallbacks.counts == {"turn": 10}
    go_on.set()
    thread.join(60)
    with turns:
        assert turns.num_waiting == 0
    assert turns.fallbacks.counts == {"turn": 10}


def test_a_process_knows_whether_others_have_work(tmp_path: Path) -> None:
    """Until the other process says that it has none, or dies."""
    turns = FairFileLock(tmp_path / "turns")
    turns.note_work(True)
    assert not turns.others_have_work
    command = [sys.executable, "-c", WORKING, str(tmp_path / "turns")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        for has_work in (True, False, True):
            other.stdin.write(f"{int(has_work)}\n")
            other.stdin.flush()
            assert other.stdout.readline() == "True\n"  # what the other process is told of this one
            assert turns.others_have_work is has_work
        other.kill()
        other.wait()
        assert not turns.others_have_work


def test_a_thread_knows_whether_others_have_work() -> None:
    turns, found = FairLock(), []
    turns.note_work(True)
    assert not turns.others_have_work

    def other() -> None:
        for has_work in (True, False):
            turns.note_work(has_work)
            found.append(turns.others_have_work)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert found == [True, True]
    assert not turns.others_have_work


def test_a_process_is_told_that_it_is_its_turn(
    stepping: Stepping, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_lock, "_POLL_S", 60.0)
    stepping()
    turns = FairFileLock(tmp_path / "turns", patience_s=60.0)
    assert all(is_in_turn(turns) for _ in range(20))


def is_in_turn(turns: FairFileLock) -> bool:
    before = dict(turns.fallbacks.counts)
    with turns:
        return turns.fallbacks.counts == before


def holds(path: Path, pid: int) -> bool:
    """Returns whether the process has locked the file's first byte."""
    inode, locks = path.stat().st_ino, Path("/proc/locks").read_text().splitlines()
    found = [line.split() for line in locks if line.split()[5].endswith(f":{inode}")]
    return any(fields[4] == str(pid) and fields[6] == "0" for fields in found)
