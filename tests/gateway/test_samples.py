"""Requests with several samples, and beam searches, with workers that fail according to a script: tokens are right."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import DeadlineExceeded, Unavailable
from common.kv_retention import KvRules
from common.types import FinishReason
from gateway.fleet.worker_lost import WorkerLost
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.wanted import IdsPrompt, Wanted
from gateway.request.delta import Delta
from gateway.request.detokenize import Detokenizers
from gateway.request.outlet import Outlet
from gateway.request.state import RequestState
from protos.v1 import decode_pb2 as pb
from protos.v1 import prefill_pb2
from protos.v1 import types_pb2 as types_pb
from testing.gateway.parts import Fault, Script, beam_score, expected_ids
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import PROMPT, deltas_of, run, text_of, until

LONG_PROMPT = [1, *range(30, 68)]
"""39 tokens: two full blocks and a partial one."""


def split(deltas: list[Delta]) -> dict[int, list[Delta]]:
    """Returns the deltas of each sample."""
    found: dict[int, list[Delta]] = {}
    for delta in deltas:
        found.setdefault(delta.index, []).append(delta)
    return found


def ids_by_sample(deltas: list[Delta]) -> dict[int, list[int]]:
    return {index: [t for p in mine for t in p.token_ids] for index, mine in sorted(split(deltas).items())}


def expected(count: int, length: int = 12, prompt: list[int] = PROMPT) -> dict[int, list[int]]:
    return {sample: expected_ids(prompt, length, sample) for sample in range(count)}


def nothing_is_held(rig: Rig) -> bool:
    """Checks that no sequence is counted at a worker or at the gate."""
    states = rig.workers.states.values()
    return rig.gate.inside == 0 and all(s.dispatched_sequences == s.dispatched_tokens == 0 for s in states)


async def test_three_samples_take_one_prefill_and_one_hand_over(make_rig: MakeRig) -> None:
    rig = await make_rig()
    deltas = await run(rig, n=3, logprobs=1, prompt_logprobs=0, prompt=IdsPrompt(LONG_PROMPT))
    assert ids_by_sample(deltas) == expected(3, prompt=LONG_PROMPT)
    for index, mine in split(deltas).items():
        assert text_of(mine) == rig.assets.tokenizer.decode(expected_ids(LONG_PROMPT, 12, index))
        assert [item.token_id for p in mine for item in p.logprobs] == expected_ids(LONG_PROMPT, 12, index)
        assert [p.finish_reason for p in mine if p.finish_reason] == [FinishReason.LENGTH]
    assert [bool(p.prompt_logprobs) for p in deltas] == [True] + [False] * (len(deltas) - 1)
    assert [p.summary is not None for p in deltas] == [False] * (len(deltas) - 1) + [True]
    summary = deltas[-1].summary
    assert summary is not None and (summary.prompt_tokens, summary.completion_tokens, summary.attempts) == (39, 36, 1)
    assert summary.handed_over_tokens == 39, "blocks that samples share count once"
    assert len(rig.script.prefilled) == len(rig.script.submitted) == 1
    branches = rig.script.submitted[0].branches
    assert [b.sample_index for b in branches] == [0, 1, 2] and {len(b.output_token_ids) for b in branches} == {1}
    assert nothing_is_held(rig) and not rig.script.cancelled


async def test_every_sample_ends_by_itself(make_rig: MakeRig) -> None:
    rig = await make_rig()
    whole = expected(3, 30)
    stops = [whole[0][0], whole[1][7]]  # the first sample ends in prefill, the second in decode
    assert stops[0] not in whole[1][:7] + whole[2] and stops[1] not in whole[2]
    deltas = await run(rig, n=3, max_tokens=30, stop_token_ids=stops)
    assert ids_by_sample(deltas) == {0: whole[0][:1], 1: whole[1][:8], 2: whole[2]}
    ends = {p.index: (p.finish_reason, p.stop_token_id) for p in deltas if p.finish_reason}
    assert ends == {
        0: (FinishReason.STOP, stops[0]),
        1: (FinishReason.STOP, stops[1]),
        2: (FinishReason.LENGTH, None),
    }
    assert deltas[-1].index == 2 and deltas[-1].summary is not None and deltas[-1].summary.completion_tokens == 39
    assert [b.sample_index for b in rig.script.submitted[0].branches] == [1, 2]


async def test_the_router_learns_in_how_many_steps_groups_decode(make_rig: MakeRig) -> None:
    rig = await make_rig()
    costs = rig.workers._router.costs
    before = costs.group_s
    await run(rig, n=3, max_tokens=12)
    assert costs.group_s < before
    assert costs.group_steps == pytest.approx(11), "prefill draws the first token"


async def test_samples_that_all_end_with_their_first_token_never_reach_decode(make_rig: MakeRig) -> None:
    rig = await make_rig()
    deltas = await run(rig, n=3, max_tokens=1)
    assert ids_by_sample(deltas) == expected(3, 1) and not rig.script.submitted
    assert [p.summary is not None for p in deltas] == [False, False, True]


@pytest.mark.parametrize("at", [0, 20])
async def test_a_stop_string_ends_one_sample_and_cancels_only_it(make_rig: MakeRig, at: int) -> None:
    rig = await make_rig(Script(step_s=0.002))
    texts = {index: text_of(mine) for index, mine in split(await run(rig, n=3, max_tokens=60)).items()}
    stop = texts[1][at : at + 4] if at else rig.assets.tokenizer.decode(expected_ids(PROMPT, 1, 1))
    assert stop not in texts[0] + "\n" + texts[2]
    deltas = split(await run(rig, n=3, max_tokens=60, stop=[stop]))
    assert text_of(deltas[1]) == texts[1][: texts[1].index(stop)] and deltas[1][-1].stop_string == stop
    assert text_of(deltas[0]) == texts[0] and text_of(deltas[2]) == texts[2]
    await until(lambda: rig.script.cancelled_samples == [(2, 1)])
    assert rig.script.cancelled == []
    assert nothing_is_held(rig)


async def test_the_last_sample_that_a_stop_string_ends_takes_the_group_with_it(make_rig: MakeRig) -> None:
    rig = await make_rig()
    texts = {index: text_of(mine) for index, mine in split(await run(rig, n=2, max_tokens=100)).items()}
    stops = [texts[index][30:34] for index in (0, 1)]
    rig.script.step_s = 0.002
    deltas = split(await run(rig, n=2, max_tokens=100, stop=stops))
    assert {mine[-1].finish_reason for mine in deltas.values()} == {FinishReason.STOP}
    await until(lambda: rig.script.cancelled == [2])
    assert len(rig.script.cancelled_samples) == 1


FAULTS = {
    "session lost": Fault("die", 4),
    "lost": Fault("reject", 4, pb.REJECTION_LOST),
    "given back": Fault("reject", 4, pb.REJECTION_GIVEN_BACK),
    "given back before its first step": Fault("reject", 0, pb.REJECTION_GIVEN_BACK),
    "a gap": Fault("gap", 4),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("burst", [False, True])
async def test_only_samples_that_have_not_ended_go_again(make_rig: MakeRig, name: str, burst: bool) -> None:
    fault, whole = FAULTS[name], expected(3, 20)
    rig = await make_rig(Script(submits=[fault], burst=burst), num_decode=2)
    stop = whole[1][1]
    assert stop not in whole[0] + whole[2]
    deltas = await run(rig, n=3, max_tokens=20, stop_token_ids=[stop])
    assert ids_by_sample(deltas) == {0: whole[0], 1: whole[1][:2], 2: whole[2]}
    for index, mine in split(deltas).items():
        kept = whole[index][: 1 if index == 1 else 20]  # the text of a stop token is omitted
        assert text_of(mine) == rig.assets.tokenizer.decode(kept)
    again, summary = rig.script.prefilled[1], deltas[-1].summary
    assert summary is not None and summary.attempts == 2 and summary.completion_tokens == 42
    # Plain tokens of several steps precede the other outputs of these steps, so a gap among them comes before an end.
    end_is_known = fault.after and not (burst and fault.action == "gap")
    if end_is_known:
        assert [b.sample_index for b in again.branches] == [0, 2], "the one that ended does not go again"
    for branch in again.branches:
        assert list(branch.output_token_ids) == whole[branch.sample_index][: len(branch.output_token_ids)]
        assert len(branch.output_token_ids) == 1 + (fault.after if branch.sample_index != 1 else 0)
    assert nothing_is_held(rig)


async def test_samples_may_be_at_different_places_when_they_go_again(make_rig: MakeRig) -> None:
    """Samples are at different positions if only some of a step's outputs have arrived."""
    rig = await make_rig(Script(submits=[Fault("die", 3)]))
    request = await rig.validator.resolve(wanted(n=2))
    state = RequestState.begin(
        request, Detokenizers(rig.assets.tokenizer), b"", Outlet(list[Delta]().extend), rig.metrics
    )
    for sample, count in ((0, 5), (1, 3)):
        output = pb.SequenceOutput(sample_index=sample, token_ids=expected_ids(PROMPT, count, sample))
        assert state.accept(output) is False
    message = state.prefill_request()
    assert [list(b.output_token_ids) for b in message.branches] == [
        expected_ids(PROMPT, 5, 0),
        expected_ids(PROMPT, 3, 1),
    ]
    # 4 + 5 + 1 and 4 + 3 + 1 tokens without shared blocks: three and two blocks of four
    assert state.blocks_to_come_back(KvRules(4)) == 1 + (3 - 1) + (2 - 1)
    with pytest.raises(WorkerLost):
        state.accept(pb.SequenceOutput(sample_index=2, token_ids=[5]))


async def test_decode_is_told_the_time_left_and_computes_no_log_probabilities_of_the_prompt(make_rig: MakeRig) -> None:
    rig = await make_rig()
    request = await rig.validator.resolve(wanted(prompt_logprobs=2, timeout_s=10.0))
    state = RequestState.begin(
        request, Detokenizers(rig.assets.tokenizer), b"", Outlet(list[Delta]().extend), rig.metrics
    )
    assert state.prefill_request().sampling.prompt_logprobs == 2
    state.attempts = 1
    before = state.remaining_s()
    message = state.submit_request(prefill_pb2.PrefillDone(), state.open_samples)
    assert int(state.remaining_s() * 1000) <= message.timeout_ms <= before * 1000
    assert not message.sampling.HasField("prompt_logprobs")


def begin(rig: Rig, request: ResolvedRequest) -> RequestState:
    outlet = Outlet(list[Delta]().extend)
    return RequestState.begin(request, Detokenizers(rig.assets.tokenizer), b"", outlet, rig.metrics)


def wanted(**values: Any) -> Wanted:
    return Wanted(**{"prompt": IdsPrompt(PROMPT), "max_tokens": 12, "temperature": 0.0, **values})


async def test_a_beam_search_comes_whole_at_its_end_with_scores(make_rig: MakeRig) -> None:
    rig = await make_rig()
    deltas = await run(rig, beam_width=4, n=2, logprobs=0, prompt_logprobs=0)
    assert [(p.index, p.token_ids) for p in deltas] == list(expected(2).items())
    assert [p.beam_score for p in deltas] == [beam_score(0), beam_score(1)]
    assert [p.text for p in deltas] == [rig.assets.tokenizer.decode(ids) for ids in expected(2).values()]
    assert [len(p.prompt_logprobs) for p in deltas] == [3, 0] and [len(p.logprobs) for p in deltas] == [12, 12]
    summary = deltas[-1].summary
    assert summary is not None and summary.completion_tokens == 24 and summary.handed_over_tokens == 4
    submit, prefill = rig.script.submitted[0], rig.script.prefilled[0]
    for message in (prefill, submit):
        assert [list(b.output_token_ids) for b in message.branches] == [[]]
        assert (message.sampling.beam_width, message.sampling.num_sequences) == (4, 2)
    assert list(submit.beam_candidates.token_ids) == [5] and nothing_is_held(rig)
    assert rig.metric("vllm:generation_tokens_total") == 24
    assert rig.metric("vllm:inter_token_latency_seconds_count") == 0, "there is no time between a beam's tokens"


@pytest.mark.parametrize("name", ["session lost", "given back", "lost"])
async def test_a_beam_search_that_is_lost_starts_over(make_rig: MakeRig, name: str) -> None:
    rig = await make_rig(Script(submits=[FAULTS[name]]), num_decode=2)
    deltas = await run(rig, beam_width=3)
    assert ids_by_sample(deltas) == expected(3) and len(rig.script.submitted) == 2
    assert [list(b.output_token_ids) for p in rig.script.prefilled for b in p.branches] == [[], []]
    assert nothing_is_held(rig)


async def test_a_group_has_as_many_places_as_sequences(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(step_s=0.01), num_decode=2)
    wide = asyncio.create_task(run(rig, n=5, max_tokens=400))
    beams = asyncio.create_task(run(rig, beam_width=4, n=1, max_tokens=400))
    await until(lambda: len(rig.script.submitted) == 2)
    assert sorted(s.dispatched_sequences for s in rig.workers.states.values()) == [0, 4, 5], "each has its own worker"
    assert rig.gate.inside == 9 and rig.gate.num_running == 2
    wide.cancel()
    beams.cancel()
    await asyncio.gather(wide, beams, return_exceptions=True)
    await until(lambda: len(rig.script.cancelled) == 2)
    assert nothing_is_held(rig)


async def test_a_group_that_was_given_back_waits_for_blocks_ahead_of_new_requests(make_rig: MakeRig) -> None:
    full = types_pb.WorkerLoad(free_blocks=3, total_blocks=64)
    script = Script(submits=[Fault("none"), Fault("reject", 3, pb.REJECTION_GIVEN_BACK)], step_s=0.02, load=full)
    rig = await make_rig(script)
    other = asyncio.create_task(run(rig, max_tokens=400))
    await until(lambda: script.submitted)
    back = asyncio.create_task(run(rig, n=3))
    await until(lambda: rig.gate.num_waiting == 1)
    new = asyncio.create_task(run(rig))
    await asyncio.sleep(0.2)
    assert len(script.prefilled) == 2 and rig.gate.num_waiting == 2, "neither goes while there are no blocks"
    script.load.free_blocks = 40
    assert ids_by_sample(await back) == expected(3)
    await new
    assert [len(p.branches) for p in script.prefilled] == [1, 3, 3, 1]
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert nothing_is_held(rig) and rig.gate.num_waiting == 0


async def test_with_nothing_else_at_the_workers_a_group_given_back_goes_at_once(make_rig: MakeRig) -> None:
    full = types_pb.WorkerLoad(free_blocks=0, total_blocks=64)
    rig = await make_rig(Script(submits=[Fault("reject", 3, pb.REJECTION_GIVEN_BACK)] * 5, load=full))
    answers = await asyncio.gather(*(run(rig, n=2, max_tokens=20) for _ in range(2)))
    assert [ids_by_sample(deltas) for deltas in answers] == [expected(2, 20)] * 2
    assert len(rig.script.prefilled) == 7 and nothing_is_held(rig)


async def test_a_group_that_waits_for_blocks_ends_at_its_deadline(make_rig: MakeRig) -> None:
    full = types_pb.WorkerLoad(free_blocks=0, total_blocks=64)
    script = Script(submits=[Fault("none"), Fault("reject", 1, pb.REJECTION_GIVEN_BACK)], step_s=0.02, load=full)
    rig = await make_rig(script)
    other = asyncio.create_task(run(rig, max_tokens=400))
    await until(lambda: script.submitted)
    with pytest.raises(DeadlineExceeded):
        await run(rig, n=3, timeout_s=0.5)
    assert rig.gate.inside == 1 and rig.gate.num_waiting == 0
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert nothing_is_held(rig)


async def test_groups_go_only_to_workers_that_hold_them(make_rig: MakeRig) -> None:
    rig = await make_rig(num_decode=2, floors=[4, 40], recover_s=0.3)
    for _ in range(3):
        assert ids_by_sample(await run(rig, n=4, max_tokens=20)) == expected(4, 20)
    assert rig.metric('looseleaf_worker_requests_total{model_name="tiny",role="decode",worker="d1"}') == 3
    request = await rig.validator.resolve(wanted(n=4, max_tokens=20))
    rig.records.pop()  # removes the large worker, which validation still counts
    await until(lambda: "d1" not in rig.workers.states)
    with pytest.raises(Unavailable):
        await deltas_of(rig, request)
