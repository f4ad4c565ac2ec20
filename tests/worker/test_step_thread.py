"""Step threads take turns: their steps never overlap, commands need no turn, failures are reported."""

from __future__ import annotations

import threading
import time

import pytest

from worker.fair_lock import FairLock
from worker.step_thread import StepThread


@pytest.mark.parametrize("by_turns", [True, False])
def test_steps_overlap_only_without_turns(by_turns: bool) -> None:
    inside, most, done = 0, 0, [0, 0]
    lock = threading.Lock()

    def step_of(number: int) -> float | None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.001)
        with lock:
            inside -= 1
            done[number] += 1
        return 0.0 if done[number] < 50 else None

    turns = FairLock() if by_turns else None
    threads = [StepThread(lambda number=number: step_of(number), turns) for number in range(2)]  # type: ignore[misc]
    for thread in threads:
        thread.start(lambda: None)
        thread.post(lambda: None)
    deadline = time.monotonic() + 60
    while min(done) < 50 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert all(thread.stop(60) for thread in threads)
    assert min(done) >= 50
    assert most == (1 if by_turns else 2)


def test_commands_run_while_another_thread_steps() -> None:
    turns, ran, stepping, go_on = FairLock(), threading.Event(), threading.Event(), threading.Event()

    def long_step() -> None:
        stepping.set()
        go_on.wait(60)

    busy, other = StepThread(long_step, turns), StepThread(lambda: None, turns)
    busy.start(lambda: None)
    other.start(lambda: None)
    busy.post(lambda: None)
    assert stepping.wait(60)
    other.post(ran.set)
    assert ran.wait(60)
    go_on.set()
    assert busy.stop(60) and other.stop(60)


def test_a_step_that_fails_is_told_and_gives_its_turn_back() -> None:
    turns, failed = FairLock(), threading.Event()

    def fail() -> None:
        raise RuntimeError("on purpose")

    thread = StepThread(fail, turns)
    thread.start(failed.set)
    thread.post(lambda: None)
    assert failed.wait(60)
    with turns:
        pass
    assert not thread.stop(60), "what the failed step had started may still write"
