"""Open-loop sending: each request once over all processes, late ones are seen, and the end cuts off the rest."""

from __future__ import annotations

import time

import gevent
import pytest
from gevent.event import Event

from loadtest.open_loop import Replay


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_every_request_is_sent_by_one_process(shares: int) -> None:
    sent: list[int] = []
    replays = [
        Replay([number / 1000 for number in range(50)], share, shares, lambda number, _: sent.append(number))
        for share in range(shares)
    ]
    for replay in replays:
        replay.start()
    with gevent.Timeout(60):
        while not all(replay.done for replay in replays):
            gevent.sleep(0.01)
    assert sorted(sent) == list(range(50))


def test_requests_do_not_wait_for_answers() -> None:
    answered, sent = Event(), []

    def send(number: int, late_s: float) -> None:
        sent.append(number)
        answered.wait()

    replay = Replay([0.0] * 30, 0, 1, send)
    replay.start()
    with gevent.Timeout(60):
        while len(sent) < 30:
            gevent.sleep(0.01)
        assert not replay.done
        answered.set()
        while not replay.done:
            gevent.sleep(0.01)


def test_a_busy_process_says_how_late_it_sends() -> None:
    late: list[float] = []

    def send(number: int, late_s: float) -> None:
        late.append(late_s)
        time.sleep(0.3)  # keeps the whole process busy, unlike a wait for an answer

    replay = Replay([0.0, 0.0, 0.0, 100.0], 0, 1, send)
    replay.start()
    with gevent.Timeout(60):
        while len(late) < 3:
            gevent.sleep(0.01)
    assert late[1] >= 0.3 and late[2] >= 0.6
    replay.stop(0.0)


def test_the_end_waits_for_answers_and_cuts_off_the_rest() -> None:
    answered, ended = Event(), []

    def send(number: int, _: float) -> None:
        try:
            if number == 1:
                gevent.sleep(1000)
            answered.wait()
        finally:
            ended.append(number)

    replay = Replay([0.0, 0.0, 1000.0], 0, 1, send)
    replay.start()
    gevent.sleep(0.01)
    gevent.spawn_later(0.05, answered.set)
    replay.stop(2.0)
    assert ended == [0, 1] and not replay.done
