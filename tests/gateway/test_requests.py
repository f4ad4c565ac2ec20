"""Requests with workers that fail according to a script: the tokens are always right."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import (
    Aborted,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    LooseleafError,
    ResourceExhausted,
    Unavailable,
)
from common.ticket import Ticket
from common.types import FinishReason
from gateway.fleet.liveness import LivenessLimits
from gateway.fleet.workers import Workers
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.wanted import IdsPrompt, TextPrompt, Wanted
from gateway.request.delta import Delta
from gateway.request.outlet import Outlet
from protos.v1 import decode_pb2 as pb
from testing.gateway.parts import Fault, Script, expected_ids
from tests.gateway.conftest import MakeRig, Rig

PROMPT = [1, 50, 60, 70]
SILENCE_S = 1.5
"""A limit on the silence of a worker that is longer than any pause of this process that `Liveness` overlooks."""


async def deltas_of(rig: Rig, request: ResolvedRequest) -> list[Delta]:
    """Returns all deltas in the order in which they were sent."""
    deltas: list[Delta] = []
    async with Outlet(deltas.extend) as outlet:
        await rig.runner.run(request, outlet)
    return deltas


async def run(rig: Rig, **wanted: Any) -> list[Delta]:
    values = {"prompt": IdsPrompt(PROMPT), "max_tokens": 12, "temperature": 0.0, **wanted}
    request = await rig.validator.resolve(Wanted(**values))
    return await deltas_of(rig, request)


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_request_goes_from_prefill_to_decode_and_is_accounted(make_rig: MakeRig) -> None:
    rig = await make_rig()
    deltas = await run(rig, logprobs=1, prompt_logprobs=0)
    assert ids_of(deltas) == expected_ids(PROMPT, 12)
    assert [item.token_id for delta in deltas for item in delta.logprobs] == ids_of(deltas)
    assert [item.token_id for item in deltas[0].prompt_logprobs] == PROMPT[1:]
    summary = deltas[-1].summary
    assert summary is not None and deltas[-1].finish_reason is FinishReason.LENGTH
    assert (summary.prompt_tokens, summary.completion_tokens, summary.attempts) == (4, 12, 1)
    assert summary.sources.computed == 4 and summary.handed_over_tokens == 4
    assert summary.timings.prefill_ns == 2_000_000 and summary.timings.decode_ns == 4_000_000
    assert summary.timings.queue_ns >= 1_000_000 and summary.timings.hand_over_ns == 3_000_000
    assert rig.metric("vllm:generation_tokens_total") == 12 and rig.metric("looseleaf_hand_overs_total") == 1


async def test_a_request_that_ends_with_its_first_token_never_reaches_decode(make_rig: MakeRig) -> None:
    rig = await make_rig()
    deltas = await run(rig, max_tokens=1)
    assert ids_of(deltas) == expected_ids(PROMPT, 1) and not rig.script.submitted


FAULTS = {
    "given back": ([Fault("reject", 3, pb.REJECTION_GIVEN_BACK)], "given_back"),
    "lost": ([Fault("reject", 0, pb.REJECTION_LOST)], "lost"),
    "draining": ([Fault("reject", 5, pb.REJECTION_DRAINING)], "draining"),
    "queue full": ([Fault("reject", 0, pb.REJECTION_QUEUE_FULL)], "queue_full"),
    "failed": ([Fault("reject", 2, pb.REJECTION_INTERNAL)], "internal"),
    "a gap in the tokens": ([Fault("gap", 4)], "gap"),
    "session lost": ([Fault("die", 3)], "session_lost"),
    "twice": ([Fault("die", 3), Fault("reject", 1, pb.REJECTION_LOST)], ""),
    "given back more often than attempts are allowed": (
        [Fault("reject", 1, pb.REJECTION_GIVEN_BACK)] * 4,
        "given_back",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_lost_attempt_is_prefilled_again_and_changes_no_token(make_rig: MakeRig, name: str) -> None:
    faults, reason = FAULTS[name]
    rig = await make_rig(Script(submits=list(faults)))
    deltas = await run(rig)
    assert ids_of(deltas) == expected_ids(PROMPT, 12)
    assert text_of(deltas) == text_of(await run(rig))
    assert rig.metric("looseleaf_requests_retried_total") == len(faults)
    if reason:
        assert rig.metric(f'looseleaf_requests_retried_total{{model_name="tiny",reason="{reason}"}}') == len(faults)
    assert deltas[-1].summary is not None and deltas[-1].summary.attempts == len(faults) + 1
    again = rig.script.prefilled[1].branches[0]
    assert list(again.output_token_ids) == expected_ids(PROMPT, 12)[: len(again.output_token_ids)]
    assert len(again.output_token_ids) >= 1
    assert [p.attempt for p in rig.script.prefilled[: len(faults) + 1]] == list(range(len(faults) + 1))


@pytest.mark.parametrize("action", ["stray", "repeat"])
async def test_messages_of_another_attempt_and_repeated_ones_are_dropped(make_rig: MakeRig, action: str) -> None:
    rig = await make_rig(Script(submits=[Fault(action, 3)]))
    assert ids_of(await run(rig)) == expected_ids(PROMPT, 12)
    assert rig.metric("looseleaf_requests_retried_total") == 0


async def test_tokens_that_come_together_with_a_rejection_reach_the_client(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(submits=[Fault("reject", 5, pb.REJECTION_GIVEN_BACK)], burst=True))
    deltas = await run(rig)
    assert ids_of(deltas) == expected_ids(PROMPT, 12) and max(len(p.token_ids) for p in deltas) >= 5
    assert text_of(deltas) == rig.assets.tokenizer.decode(ids_of(deltas))


async def test_before_min_tokens_no_stop_string_ends_the_sample(make_rig: MakeRig) -> None:
    rig = await make_rig()
    whole = await run(rig, max_tokens=60)
    early = text_of(whole[:4])[-3:]
    stopped = await run(rig, max_tokens=60, stop=[early])
    assert len(ids_of(stopped)) <= 5 and stopped[-1].stop_string == early
    later = await run(rig, max_tokens=60, stop=[early], min_tokens=30)
    assert len(ids_of(later)) >= 30 and text_of(later).startswith(text_of(whole[:5]))


@pytest.mark.parametrize("error", [Aborted("stale"), Unavailable("gone"), ResourceExhausted("full")])
async def test_a_prefill_that_fails_is_tried_again(make_rig: MakeRig, error: LooseleafError) -> None:
    rig = await make_rig(Script(prefills=[error]))
    assert ids_of(await run(rig)) == expected_ids(PROMPT, 12)
    assert len(rig.script.prefilled) == 2


async def test_attempts_are_bounded_and_the_client_learns_the_last_reason(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(submits=[Fault("reject", 1, pb.REJECTION_LOST)] * 9))
    with pytest.raises(Unavailable) as caught:
        await run(rig)
    assert caught.value.retry_after_s is not None and len(rig.script.prefilled) == 3
    rig.script.submits[:] = [Fault("reject", 1, pb.REJECTION_QUEUE_FULL)] * 9
    with pytest.raises(ResourceExhausted):
        await run(rig)


async def test_what_can_never_fit_is_refused_without_another_attempt(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(submits=[Fault("reject", 0, pb.REJECTION_TOO_LARGE)]))
    with pytest.raises(InvalidArgument):
        await run(rig)
    assert len(rig.script.prefilled) == 1


async def test_a_silent_decode_worker_ends_at_the_deadline_and_is_told(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(submits=[Fault("silence", 2)]))
    began = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        await run(rig, timeout_s=4.0)
    assert asyncio.get_running_loop().time() - began < 30.0, "the limits on its silence are 60 s"
    await until(lambda: rig.script.cancelled == [1])
    assert rig.script.submitted[0].timeout_ms <= 4000


async def test_a_silent_decode_worker_is_given_up_after_the_stall_time(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(submits=[Fault("silence", 2)]), stall_s=SILENCE_S)
    assert ids_of(await run(rig)) == expected_ids(PROMPT, 12)
    assert rig.metric("looseleaf_requests_retried_total") == 1


async def test_a_frozen_decode_worker_is_given_up_when_its_heartbeats_stop(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(submits=[Fault("freeze", 2)]), silence_s=SILENCE_S, num_decode=2)
    assert ids_of(await run(rig)) == expected_ids(PROMPT, 12)
    assert rig.metric('looseleaf_requests_retried_total{model_name="tiny",reason="session_silent"}') == 1


async def test_a_frozen_prefill_worker_is_given_up_when_its_heartbeats_stop(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(prefills=[600.0], prefill_heartbeats=False), silence_s=SILENCE_S)
    assert ids_of(await run(rig)) == expected_ids(PROMPT, 12)
    assert rig.metric('looseleaf_requests_retried_total{model_name="tiny",reason="prefill_silent"}') == 1
    await until(lambda: rig.script.prefills_cancelled == 1)


async def test_slow_workers_whose_hearts_beat_are_waited_for(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(prefills=[2.0], step_s=2.0), silence_s=SILENCE_S)
    assert ids_of(await run(rig, max_tokens=3)) == expected_ids(PROMPT, 3)
    assert rig.metric("looseleaf_requests_retried_total") == 0


async def test_a_request_whose_workers_die_twice_is_refused_from_then_on(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(submits=[Fault("die", 0), Fault("die", 0)]), num_decode=3)
    with pytest.raises(Internal):
        await run(rig)
    assert len(rig.script.submitted) == 2
    with pytest.raises(Internal):
        await run(rig, seed=5, temperature=1.0)
    assert len(rig.script.prefilled) == 2, "refused before it reaches a worker"
    assert ids_of(await run(rig, prompt=IdsPrompt([1, 2, 3]))) == expected_ids([1, 2, 3], 12)


async def test_a_request_that_goes_on_between_deaths_did_not_cause_them(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(submits=[Fault("die", 2), Fault("die", 2)]), num_decode=3)
    assert ids_of(await run(rig)) == expected_ids(PROMPT, 12)
    assert len(rig.script.submitted) == 3


async def test_a_request_that_completes_after_a_death_is_forgotten(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(submits=[Fault("die", 2)]), num_decode=3)
    assert ids_of(await run(rig)) == expected_ids(PROMPT, 12)
    rig.script.submits.append(Fault("die", 2))
    assert ids_of(await run(rig)) == expected_ids(PROMPT, 12)


async def test_a_slow_prefill_ends_at_the_deadline(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(prefills=[600.0]))
    with pytest.raises(DeadlineExceeded):
        await run(rig, timeout_s=4.0)
    await until(lambda: rig.script.prefills_cancelled == 1)


async def test_a_reader_that_goes_away_cancels_prefill_or_decode(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(prefills=[600.0]))
    task = asyncio.create_task(run(rig))
    await until(lambda: rig.script.prefilled)
    task.cancel()
    await until(lambda: rig.script.prefills_cancelled == 1)
    rig.script.step_s = 0.02
    task = asyncio.create_task(run(rig, max_tokens=400))
    await until(lambda: rig.script.submitted)
    task.cancel()
    await until(lambda: rig.script.cancelled == [1])
    assert rig.metric('looseleaf_requests_ended_total{finished_reason="abort"') == 2
    assert all(s.dispatched_sequences == 0 and s.dispatched_tokens == 0 for s in rig.workers.states.values())


async def test_a_ticket_that_no_decode_worker_gets_is_ended(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first attempt, no decode worker had a free place. The second ticket is claimed, so the gateway does not
    end it."""
    rig = await make_rig()
    ended: list[Ticket] = []

    async def end(ticket: Ticket) -> None:
        ended.append(ticket)

    async def lookup(*_: object) -> dict[str, int]:
        return {}

    rig.workers.use_ledgers(lookup, end)
    places = iter([None])
    pick_decode = rig.workers.pick_decode
    monkeypatch.setattr(rig.workers, "pick_decode", lambda *args: next(places, pick_decode(*args)))
    await run(rig)
    await until(lambda: ended)
    assert len(rig.script.prefilled) == 2 and [ticket.arena_id for ticket in ended] == ["a"]


async def test_a_stop_string_ends_the_sample_and_cancels_the_rest_at_the_worker(make_rig: MakeRig) -> None:
    rig = await make_rig()
    whole = text_of(await run(rig, max_tokens=200))
    stop = whole[20:24]
    rig.script.step_s = 0.001
    deltas = await run(rig, max_tokens=200, stop=[stop])
    assert text_of(deltas) == whole[: whole.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_string) == (FinishReason.STOP, stop)
    await until(lambda: len(rig.script.cancelled) == 1)
    kept = await run(rig, max_tokens=200, stop=[stop], include_stop_str_in_output=True)
    assert text_of(kept) == whole[: whole.index(stop) + len(stop)]


async def test_text_equals_the_full_decode(make_rig: MakeRig) -> None:
    rig = await make_rig()
    deltas = await run(rig, max_tokens=300)
    assert text_of(deltas) == rig.assets.tokenizer.decode(ids_of(deltas))


def no_workers(rig: Rig) -> None:
    rig.workers.on_records = lambda records: None  # type: ignore[method-assign]
    rig.workers._router.update([], 0.0)


async def test_without_workers_for_long_a_request_is_refused_at_once(make_rig: MakeRig) -> None:
    rig = await make_rig(recover_s=0.05)
    no_workers(rig)
    await asyncio.sleep(0.1)
    with pytest.raises(Unavailable) as caught:
        await run(rig)
    assert caught.value.retry_after_s is not None and rig.gate.inside == 0
    never = Workers(LivenessLimits())
    assert never.missing_for() == float("inf")
    await never.close()


async def test_workers_have_joined_when_they_are_known_and_decode_sessions_are_open(make_rig: MakeRig) -> None:
    rig = await make_rig(num_decode=2)
    async with asyncio.timeout(60):
        await rig.workers.joined(3)
    prefill, decode, _ = rig.records
    rig.records.append(replace(decode, worker_id="d9", address="127.0.0.1:1"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rig.workers.joined(4), 0.5)
    rig.records.append(replace(prefill, worker_id="p9"))
    async with asyncio.timeout(60):
        await rig.workers.joined(4)


async def test_while_workers_are_away_a_group_too_large_for_the_last_ones_is_refused(make_rig: MakeRig) -> None:
    rig = await make_rig(floors=[4], recover_s=0.3)
    no_workers(rig)
    with pytest.raises(InvalidArgument, match="the limit of a decode worker is 4"):
        await run(rig, max_tokens=200)


async def test_a_request_that_smaller_successors_cannot_hold_is_told_so(make_rig: MakeRig) -> None:
    rig = await make_rig(recover_s=0.3)
    request = await rig.validator.resolve(Wanted(prompt=IdsPrompt(PROMPT), max_tokens=200))
    rig.records[1:] = [replace(record, max_group_blocks=4) for record in rig.records[1:]]
    await until(lambda: {limit.max_blocks for limit in rig.workers.group_rooms} == {4})
    with pytest.raises(Unavailable, match="no decode worker has room for a group of this size"):
        await deltas_of(rig, request)
    assert rig.gate.inside == 0


async def test_while_a_launcher_restarts_a_worker_a_request_waits_until_its_deadline(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    notice = tmp_path / "restarting"
    rig = await make_rig(recover_s=0.05, restarts_file=notice)
    notice.touch()
    on_records = rig.workers.on_records
    no_workers(rig)
    late = asyncio.create_task(run(rig))
    await asyncio.sleep(0.5)
    assert not late.done(), "ten times as long as without a launcher"
    rig.workers.on_records = on_records  # type: ignore[method-assign]
    on_records(rig.records)
    assert ids_of(await late) == expected_ids(PROMPT, 12)
    no_workers(rig)
    with pytest.raises(DeadlineExceeded):
        await run(rig, timeout_s=0.3)
    notice.unlink()
    with pytest.raises(Unavailable, match="no pair"):
        await run(rig)


async def test_while_an_orchestrator_restarts_all_workers_a_request_waits_until_its_deadline(
    make_rig: MakeRig,
) -> None:
    rig = await make_rig(recover_s=0.05, await_workers=True)
    on_records = rig.workers.on_records
    no_workers(rig)
    late = asyncio.create_task(run(rig))
    await asyncio.sleep(0.5)
    assert not late.done(), "ten times as long as without an orchestrator"
    with pytest.raises(DeadlineExceeded):
        await run(rig, timeout_s=0.3)
    rig.workers.on_records = on_records  # type: ignore[method-assign]
    on_records(rig.records)
    assert ids_of(await late) == expected_ids(PROMPT, 12)


async def test_a_request_that_no_ready_worker_can_take_does_not_wait_for_an_orchestrator(make_rig: MakeRig) -> None:
    rig = await make_rig(recover_s=0.3, await_workers=True)
    request = await rig.validator.resolve(Wanted(prompt=IdsPrompt(PROMPT), max_tokens=200))
    rig.records[1:] = [replace(record, max_group_blocks=4) for record in rig.records[1:]]
    await until(lambda: {limit.max_blocks for limit in rig.workers.group_rooms} == {4})
    with pytest.raises(Unavailable, match="no decode worker has room for a group of this size"):
        await deltas_of(rig, request)


async def test_a_new_request_waits_for_the_successors_of_workers_that_were_lost(make_rig: MakeRig) -> None:
    rig = await make_rig(recover_s=10.0)
    await run(rig)
    on_records = rig.workers.on_records
    no_workers(rig)
    task = asyncio.create_task(run(rig))
    await asyncio.sleep(0.1)
    assert len(rig.script.prefilled) == 1 and not task.done()
    rig.workers.on_records = on_records  # type: ignore[method-assign]
    on_records(rig.records)
    assert ids_of(await task) == expected_ids(PROMPT, 12)


async def test_many_requests_spread_over_decode_workers(make_rig: MakeRig) -> None:
    rig = await make_rig(Script(step_s=0.002), num_decode=2)
    answers = await asyncio.gather(*(run(rig, prompt=TextPrompt(f"the mill {i}")) for i in range(40)))
    assert all(len(ids_of(deltas)) == 12 for deltas in answers)
    sessions = [rig.workers._sessions.get(f"d{i}") for i in range(2)]
    handles = [session._next_handle - 1 for session in sessions if session is not None]
    assert sum(handles) == 40 and min(handles) >= 15
