"""Turns: one at a time, and nobody is passed over."""

from __future__ import annotations

import threading
import time

from common.turns import Turns


def test_one_at_a_time() -> None:
    turns, inside, most = Turns(), 0, 0

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
    """The holder gives its turn back and asks again at once: the other, who has waited, is first."""
    turns, order = Turns(), []
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
    turns = Turns()
    for _ in range(2):
        try:
            with turns:
                raise ValueError
        except ValueError:
            pass
    with turns:
        assert turns.num_waiting == 0
