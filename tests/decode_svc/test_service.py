"""The messages of a session: every field of an output, and one message for several steps if the gateway is slow."""

from __future__ import annotations

import pytest

from common import convert
from common.types import FinishReason, Timings, TokenLogprob, WorkerLoad
from decode_svc.outputs import Output, PlainToken, Rejection
from decode_svc.service import Step, _response
from protos.v1 import decode_pb2 as pb
from worker.heartbeat import Outgoing

PLAIN = PlainToken(300, 1, 2, 1000, 7)
OUTPUT = Output(300, 1, 2, 1000, (7,))
LOAD = WorkerLoad(1, 2, 3, 4, 5, 6)


def heard(*steps: Step) -> pb.SessionResponse:
    """Returns the message to a gateway that has not read during these steps."""
    return pb.SessionResponse.FromString(_response(list(steps)).SerializeToString())


def plain(response: pb.SessionResponse) -> list[tuple[int, ...]]:
    of = response.plain_tokens
    columns = (of.handles, of.attempts, of.sample_indices, of.output_indices, of.token_ids)
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"token_ids": (7, 8)},
        {
            "token_ids": (7, 8),
            "logprobs": (TokenLogprob(7, -0.5, 1, ((7, -0.5),)), TokenLogprob(8, -1.5, 2, ((9, -0.25),))),
        },
        {"finish_reason": FinishReason.LENGTH, "timings": Timings(hand_over_ns=5, decode_ns=6)},
        {"finish_reason": FinishReason.STOP, "beam_score": -2.5, "timings": Timings(decode_ns=6)},
        {"token_ids": (), "rejection": Rejection.GIVEN_BACK},
    ],
)
def test_an_output_arrives_with_all_its_fields(fields: dict[str, object]) -> None:
    output = OUTPUT._replace(**fields)
    [message] = heard(([output], LOAD)).outputs
    assert (message.handle, message.attempt, message.sample_index, message.first_index) == (300, 1, 2, 1000)
    assert tuple(message.token_ids) == output.token_ids
    assert tuple(map(convert.logprob_from_pb, message.logprobs)) == output.logprobs
    assert convert.finish_reason_from_pb(message.finish_reason) == output.finish_reason
    assert message.rejection == (pb.REJECTION_GIVEN_BACK if output.rejection else pb.REJECTION_UNSPECIFIED)
    assert message.HasField("timings") == (output.timings is not None)
    if output.timings is not None:
        assert convert.timings_from_pb(message.timings) == output.timings
    assert (message.beam_score if message.HasField("beam_score") else None) == output.beam_score


def test_plain_tokens_are_rows_of_columns_and_nothing_else_is() -> None:
    others = [OUTPUT._replace(handle=5, finish_reason=FinishReason.STOP), OUTPUT._replace(handle=6, beam_score=0.5)]
    response = heard(([PLAIN, others[0], PLAIN._replace(handle=301, token_id=9), others[1]], LOAD))
    assert plain(response) == [(300, 1, 2, 1000, 7), (301, 1, 2, 1000, 9)]
    assert [output.handle for output in response.outputs] == [5, 6]


async def test_missed_steps_come_as_one_message_with_the_last_load_and_before_the_end() -> None:
    steps: Outgoing[Step] = Outgoing()
    for i in range(3):
        steps.put(([PLAIN._replace(output_index=i)], WorkerLoad(num_running=i)))
    steps.end()
    missed = await steps.get()
    assert missed is not None
    response = heard(*missed)
    assert list(response.plain_tokens.output_indices) == [0, 1, 2]
    assert convert.load_from_pb(response.load) == WorkerLoad(num_running=2)
    assert await steps.get() is None
