"""The effect of a prefill worker's silence, refusal or end on a request. No state of the call remains afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from common.errors import DeadlineExceeded, Internal, InvalidArgument, ResourceExhausted, Unavailable
from common.types import WorkerRecord
from gateway.fleet.prefill_client import PrefillClient, _translated
from gateway.fleet.worker_lost import WorkerLost, incarnation, is_death
from protos.v1 import prefill_pb2 as pb
from protos.v1 import types_pb2
from testing.gateway.parts import Script, make_record
from testing.gateway.scripted_workers import ScriptedWorker

WORKER = make_record("prefill", "w.prefill")
REQUEST = pb.PrefillRequest(
    prompt_token_ids=[5, 6], branches=[types_pb2.Branch()], stopping=types_pb2.StoppingParams(max_tokens=4)
)
Code = grpc.StatusCode


def error(code: grpc.StatusCode, details: str | None = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@pytest.mark.parametrize(
    ("code", "accepted", "reason", "counted", "suspect", "unreachable", "dead"),
    [
        (Code.UNAVAILABLE, False, "prefill_unreachable", False, True, True, False),
        (Code.UNAVAILABLE, True, "prefill_unavailable", True, True, False, True),
        (Code.UNAUTHENTICATED, False, "prefill_refuses_us", True, True, False, False),
        (Code.ABORTED, True, "prefill_aborted", True, False, False, False),
        (Code.CANCELLED, True, "prefill_cancelled", True, True, False, False),
        (Code.UNKNOWN, False, "prefill_unknown", True, True, False, False),
        (Code.RESOURCE_EXHAUSTED, True, "queue_full", True, True, False, False),
        (Code.INTERNAL, True, "internal", True, True, False, False),
    ],
)
def test_a_loss_by_its_status(
    code: grpc.StatusCode, accepted: bool, reason: str, counted: bool, suspect: bool, unreachable: bool, dead: bool
) -> None:
    lost = _translated(error(code), accepted, WORKER)
    assert isinstance(lost, WorkerLost)
    assert (lost.reason, lost.counted, lost.suspect, lost.unreachable) == (reason, counted, suspect, unreachable)
    assert lost.death == (incarnation(WORKER) if dead else None)
    expected = {"queue_full": ResourceExhausted, "internal": Internal}.get(reason, Unavailable)
    assert isinstance(lost.final, expected)


def test_what_the_request_is_told_itself() -> None:
    assert isinstance(_translated(error(Code.DEADLINE_EXCEEDED), True, WORKER), DeadlineExceeded)
    assert isinstance(_translated(error(Code.INVALID_ARGUMENT, "no"), True, WORKER), InvalidArgument)


@pytest.mark.parametrize("details", [None, "", "Socket closed", "keepalive watchdog timeout"])
def test_a_frozen_process_is_not_dead(details: str | None) -> None:
    assert is_death(error(Code.UNAVAILABLE, details)) == (details != "keepalive watchdog timeout")
    assert not is_death(error(Code.ABORTED, details))


@pytest.fixture
async def served() -> AsyncIterator[tuple[PrefillClient, WorkerRecord, Script, ScriptedWorker]]:
    script = Script()
    worker = ScriptedWorker("prefill", "w", script)
    record = await worker.start()
    client = PrefillClient(on_load=lambda *_: None, on_unread=lambda *_: None, silence_s=5.0)
    yield client, record, script, worker
    await client.close()
    await worker.stop()


async def test_a_call_leaves_neither_a_task_nor_a_count(served: Any) -> None:
    client, record, script, _ = served
    assert (await client.prefill(record, REQUEST, 10.0)).ticket.branches
    script.prefills = [30.0]
    calling = asyncio.create_task(client.prefill(record, REQUEST, 10.0))
    while not script.prefilled[1:]:
        await asyncio.sleep(0.01)
    assert client._channels._pooled[record.address].num_uses == 1
    await client.keep([])
    assert record.address in client._channels._pooled, "it is being read from"
    calling.cancel()
    await asyncio.wait([calling])
    assert client._channels._pooled[record.address].num_uses == 0
    await asyncio.sleep(0)
    coroutines = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    assert not any(name.endswith(("StreamResponseMixin.read", "_unless_silent")) for name in coroutines), coroutines
    with client._channels.use("127.0.0.1:1"):
        pass
    await client.keep([record.address])
    assert list(client._channels._pooled) == [record.address]
    await client.keep([])
    assert not client._channels._pooled


async def test_a_worker_that_ends_once_it_has_the_request_is_lost_and_counted(served: Any) -> None:
    client, record, script, worker = served
    script.prefills = [30.0]
    calling = asyncio.create_task(client.prefill(record, REQUEST, 10.0))
    while not script.prefilled:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await worker.server.stop(0)
    with pytest.raises(WorkerLost) as lost:
        await calling
    assert lost.value.counted and not lost.value.unreachable
