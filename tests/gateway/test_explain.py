"""What `Explain` says about requests, with workers that follow a script."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.api_keys import ApiKeys, TenantLimits
from gateway.api.http_explain import as_json
from gateway.request.explanation import MOST_ATTEMPTS, MOST_PHASES, Explanation
from gateway.request.explanations import Explanations
from protos.v1 import decode_pb2
from protos.v1 import inference_pb2 as pb
from testing.gateway.parts import Fault, Script
from testing.gateway.scripted_workers import CLAIMED
from tests.gateway.http_served import Served
from tests.gateway.http_served import serve as serve  # a fixture
from tests.gateway.test_requests import until

BODY = {"prompt": "the mill", "max_tokens": 12, "temperature": 0}


async def explained(served: Served, request_id: str, key: str | None = None) -> Any:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await served.client.get(f"/v1/explain/{request_id}", headers=headers)


def spent(explanation: dict[str, Any]) -> dict[str, int]:
    """Returns the nanoseconds by kind of phase."""
    kinds = dict.fromkeys((phase["kind"] for phase in explanation["phases"]), 0)
    for phase in explanation["phases"]:
        kinds[phase["kind"]] += phase["duration_ns"]
    return kinds


async def test_the_phases_of_a_request_have_no_gaps_and_its_workers_are_named(serve: Any) -> None:
    served = await serve(num_decode=2)
    reply = await served.client.post("/v1/completions", json=BODY, headers={"x-request-id": "team/mine"})
    [told] = (await explained(served, "team/mine")).json()["data"]
    assert told["outcome"] == "length" and told["error"] == "" and told["num_sequences"] == 1
    assert sum(phase["duration_ns"] for phase in told["phases"]) == told["total_ns"]
    assert list(spent(told))[:2] == ["intake", "gate"] and list(spent(told))[-1] == "delivery"
    assert told["usage"]["completion_tokens"] == reply.json()["usage"]["completion_tokens"] == 12
    [attempt] = told["attempts"]
    assert attempt["prefill_worker"] == "p0" and attempt["decode_worker"] in ("d0", "d1") and attempt["end"] == "done"
    assert {worker["worker_id"] for worker in attempt["decode_considered"]} == {"d0", "d1"}
    assert attempt["decode_considered"][0]["worker_id"] == attempt["decode_worker"], "the best one is first"
    assert attempt["output_tokens"] == 12 and attempt["sources"]["computed_tokens"] == told["usage"]["prompt_tokens"]
    assert 0 < told["first_token_ns"] <= told["total_ns"]


async def test_a_lost_worker_and_a_group_that_was_given_back_are_attempts_with_a_reason(serve: Any) -> None:
    given_back = Fault("reject", rejection=decode_pb2.REJECTION_GIVEN_BACK)
    served = await serve(Script(submits=[Fault("die", 3), given_back]), num_decode=2)
    await served.client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    [told] = (await explained(served, "mine")).json()["data"]
    assert [attempt["end"] for attempt in told["attempts"]] == ["session_lost", "given_back", "done"]
    assert sum(attempt["output_tokens"] for attempt in told["attempts"]) == 12
    assert told["attempts"][0]["output_tokens"] == 4, "one from prefill, three from decode"
    assert told["timings"]["hand_over_ns"] == 3_000_000 + CLAIMED.claim_ns, "of the attempts 3 and 2"
    assert spent(told)["retry"] > 0 and spent(told)["come_back"] > 0
    assert {phase["attempt"] for phase in told["phases"]} == {0, 1, 2, 3}


async def test_a_running_request_is_explained_up_to_now_and_a_failed_one_with_its_error(serve: Any) -> None:
    internal = Fault("reject", rejection=decode_pb2.REJECTION_GRAMMAR)
    served = await serve(Script(step_s=0.02, submits=[Fault("none"), internal]))
    sent = asyncio.create_task(served.client.post("/v1/completions", json={**BODY, "max_tokens": 400}))
    await until(lambda: bool(served.rig.script.submitted))
    [told] = (await served.client.get("/v1/explain")).json()["data"]
    assert told["outcome"] == "running" and "usage" not in told and told["attempts"][0]["end"] == ""
    assert sum(phase["duration_ns"] for phase in told["phases"]) == told["total_ns"]
    sent.cancel()
    await until(lambda: bool(served.rig.script.cancelled))
    reply = await served.client.post("/v1/completions", json=BODY)
    failed, cancelled = (await served.client.get("/v1/explain")).json()["data"]
    assert reply.status_code == 400 and failed["error"] == reply.json()["error"]["message"]
    assert (failed["outcome"], failed["attempts"][0]["end"]) == ("error", "failed")
    assert cancelled["outcome"] == "abort" and cancelled["attempts"][0]["end"] == "failed"


async def test_a_tenant_sees_only_its_own_requests(serve: Any) -> None:
    keys = ApiKeys({"ka": "a", "kb": "b"}, {"a": TenantLimits(), "b": TenantLimits()})
    served = await serve(keys=keys)
    for key in ("ka", "kb", "ka"):
        headers = {"x-request-id": "same", "authorization": f"Bearer {key}"}
        assert (await served.client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    assert len((await explained(served, "same", "ka")).json()["data"]) == 2
    assert len((await explained(served, "same", "kb")).json()["data"]) == 1
    other = await explained(served, "other", "ka")
    assert other.status_code == 404 and "at most 100 explanations" in other.json()["error"]["message"]
    assert (await explained(served, "same")).status_code == 401
    assert (await served.client.get("/v1/explain?limit=0", headers={"x-api-key": "ka"})).status_code == 400


def test_the_oldest_request_of_the_tenant_with_the_most_makes_room() -> None:
    kept = Explanations(4)
    for number, tenant in enumerate("abbba"):
        kept.add(Explanation(str(number), tenant, 1, 0))
    assert [e.request_id for e in kept.find("a", None, 9)] == ["4", "0"]
    assert [e.request_id for e in kept.find("b", None, 9)] == ["3", "2"]
    assert [e.request_id for e in kept.find("b", None, 1)] == ["3"]


def test_the_record_of_a_request_with_many_attempts_is_bounded_and_its_sums_hold() -> None:
    told = Explanation("x", "", 1, 0)
    rounds = 3 * MOST_ATTEMPTS
    for number in range(rounds):
        told.enter(pb.PHASE_KIND_WORKER)
        told.begin_attempt("p0", (), number)
        told.enter(pb.PHASE_KIND_PREFILL)
        told.leave([(pb.PHASE_KIND_PREFILL_QUEUE, 10)], pb.PHASE_KIND_PREFILL)
        told.decoding("d0", ())
        account = decode_pb2.GroupAccount(
            waiting_ns=5, swaps=[decode_pb2.Swap(start_ns=7, duration_ns=3, blocks_out=2)]
        )
        told.decoded(account, 1 << 60)
        told.end_attempt("given_back", number + 1)
    message = told.snapshot()
    assert len(message.attempts) == MOST_ATTEMPTS and len(message.phases) <= MOST_PHASES + len(pb.PhaseKind.values())
    assert sum(attempt.output_tokens for attempt in message.attempts) == rounds
    assert sum(attempt.swapped_out_blocks for attempt in message.attempts) == 2 * rounds
    assert sum(phase.duration_ns for phase in message.phases) == message.total_ns


@pytest.mark.parametrize("kind", ["phases", "attempts", "usage"])
def test_the_json_form_has_every_field_of_the_message(kind: str) -> None:
    message = pb.Explanation(usage=pb.Usage(), phases=[pb.Phase(kind=pb.PHASE_KIND_SWAPPED)])
    message.attempts.add()
    found = as_json(message)
    assert found["phases"] == [{"kind": "swapped", "duration_ns": 0, "attempt": 0}]
    part = found[kind] if kind == "usage" else found[kind][0]
    fields = pb.Explanation.DESCRIPTOR.fields_by_name[kind].message_type.fields
    assert {field.name for field in fields if not field.has_presence} <= set(part)
