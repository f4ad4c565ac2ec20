"""Streams of several samples: joined into one completion, and printed one sample after the other."""

from __future__ import annotations

import pytest

from common.errors import Internal
from common.types import FinishReason, Timings
from looseleaf.commands.complete import in_turn, show
from looseleaf.results import Delta, Usage, delta_from_pb, join
from protos.v1 import inference_pb2 as pb
from protos.v1 import types_pb2

USAGE = Usage(3, 5, 0, 3, 0, 3)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
MIXED = [
    Delta("a", (1,), 0),
    Delta("x", (7,), 1),
    Delta("y", (8,), 1, finish_reason=STOP, stop_reason="!"),
    Delta("b", (2,), 0),
    Delta("c", (3,), 0, finish_reason=LENGTH, usage=USAGE, timings=Timings(decode_ns=5), request_id="r"),
]


def test_pieces_become_the_samples_they_belong_to() -> None:
    done = join(MIXED)
    assert [(s.text, s.token_ids, s.finish_reason, s.stop_reason) for s in done.samples] == [
        ("abc", (1, 2, 3), LENGTH, None),
        ("xy", (7, 8), STOP, "!"),
    ]
    assert (done.text, done.token_ids, done.finish_reason) == ("abc", (1, 2, 3), LENGTH)
    assert (done.usage, done.timings.decode_ns, done.request_id) == (USAGE, 5, "r")


def test_the_last_piece_may_be_of_another_sample_than_the_first() -> None:
    swapped = [Delta("b", (2,), 1, finish_reason=STOP), Delta("a", (1,), 0, finish_reason=LENGTH, usage=USAGE)]
    assert [sample.text for sample in join(swapped).samples] == ["a", "b"]
    assert join(swapped).usage == join(swapped[::-1]).usage == USAGE


@pytest.mark.parametrize("deltas", [[], MIXED[:-1], [p for p in MIXED if p.index == 1], MIXED[:1] + MIXED[3:4]])
def test_a_stream_that_lacks_an_end_is_refused(deltas: list[Delta]) -> None:
    with pytest.raises(Internal, match="the stream ended without"):
        join(deltas)


def test_index_and_score_come_from_the_message() -> None:
    message = pb.GenerateResponse(index=2, text_delta="t", beam_score=-0.25, finish_reason=types_pb2.FINISH_REASON_STOP)
    delta = delta_from_pb(message)
    assert (delta.index, delta.beam_score, delta.finish_reason) == (2, -0.25, STOP)
    assert delta_from_pb(pb.GenerateResponse()).beam_score is None


def test_samples_are_printed_one_after_the_other() -> None:
    assert "".join(delta.text for delta in in_turn(MIXED)) == "abcxy"
    first = in_turn(iter(MIXED))
    assert [next(first).text, next(first).text] == ["a", "b"]  # the second sample's text waited


def test_printed_samples_are_numbered_only_where_there_are_several(capsys: pytest.CaptureFixture[str]) -> None:
    show(MIXED, numbered=True)
    show([Delta("one", (1,), finish_reason=STOP)], numbered=False)
    show([Delta("beam", (1,), finish_reason=STOP, beam_score=-0.5)], numbered=True)
    assert capsys.readouterr().out == "[0] abc\n[1] xy\none\n[0] (score -0.5000) beam\n"
