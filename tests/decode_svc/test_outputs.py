"""The messages that sessions receive, and when they receive them."""

from __future__ import annotations

import pytest

from common.types import SamplingParams, StoppingParams, WorkerLoad
from decode_svc import outputs
from decode_svc.outputs import TELL_S, AnyOutput, Outbox, Output, Rejection, Session
from decode_svc.scheduler import Group
from engine.sequence import Sequence

LOAD = WorkerLoad(num_running=3)
Heard = list[tuple[list[AnyOutput], WorkerLoad]]


def group(handle: int) -> Group:
    return Group(handle, 0, [Sequence([5], [], SamplingParams(), StoppingParams())])


def session() -> tuple[Session, Heard]:
    heard: Heard = []
    return Session(lambda news, load: heard.append((news, load))), heard


def test_news_are_told_once_and_without_news_the_load_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(outputs.time, "monotonic", lambda: now)
    outbox, (busy, told), (idle, silent) = Outbox(), session(), session()
    first, other = group(1), group(2)
    outbox.open(busy, first)
    outbox.open(idle, other)
    outbox.flush(LOAD)
    assert told == silent == [([], LOAD)]
    told.clear(), silent.clear()

    news = [Output(1, 0, token_ids=(7,)), Output(1, 0, token_ids=(8,))]
    now += TELL_S / 2
    for output in news:
        outbox.emit(first, output)
    outbox.flush(LOAD)
    outbox.flush(LOAD)
    assert told == [(news, LOAD)] and silent == []
    now += TELL_S / 2
    outbox.flush(LOAD)
    outbox.flush(LOAD)
    assert told[1:] == silent == [([], LOAD)], "exactly a second later, once"

    told.clear(), silent.clear()
    outbox.close(other)
    now += 2 * TELL_S
    outbox.refuse(idle, group(3), Rejection.DRAINING)
    outbox.flush(LOAD)
    assert silent == [([Output(3, 0, rejection=Rejection.DRAINING)], LOAD)] and told == [([], LOAD)]
    assert first in outbox and other not in outbox and idle.groups == {} and busy.groups == {1: first}
    now += 2 * TELL_S
    outbox.flush(LOAD)
    assert len(silent) == 1, "a session without groups hears nothing more"
