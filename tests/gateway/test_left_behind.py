"""What a request leaves behind if it ends at a rare moment: promised blocks, tickets, and the tokens it has used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.ticket import Ticket
from gateway.fleet.workers import Workers
from gateway.intake.wanted import IdsPrompt, TextPrompt, Wanted
from gateway.request.attempt import Attempts
from gateway.request.outlet import Outlet
from protos.v1 import decode_pb2
from protos.v1 import types_pb2 as pb
from testing.gateway.parts import Fault, Script
from tests.gateway.conftest import MakeRig, Rig
from tests.gateway.test_requests import until


async def run(rig: Rig, **wanted: Any) -> None:
    await rig.runner.run(await rig.validator.resolve(Wanted(**wanted)), Outlet(lambda deltas: None))


async def test_a_request_that_is_cancelled_as_it_is_let_in_again_gives_its_blocks_up(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = Fault("reject", 1, rejection=decode_pb2.REJECTION_GIVEN_BACK)
    load = pb.WorkerLoad(total_blocks=100, free_blocks=0)
    rig = await make_rig(Script(step_s=0.02, load=load, submits=[Fault("none"), given_back]))
    running = asyncio.create_task(run(rig, prompt=TextPrompt("the mill"), max_tokens=400))
    await until(lambda: len(rig.script.submitted) == 1)
    returning = asyncio.create_task(run(rig, prompt=TextPrompt("the old mill"), max_tokens=60))
    await until(lambda: bool(rig.gate._returning))
    promise = Workers.promise

    def promising(self: Workers, *args: Any) -> bool:
        if found := promise(self, *args):
            returning.cancel()
        return found

    monkeypatch.setattr(Workers, "promise", promising)
    load.free_blocks = 100
    with pytest.raises(asyncio.CancelledError):
        await returning
    assert not rig.workers._promised
    running.cancel()
    await asyncio.wait({running})
    assert rig.gate.inside == 0


async def test_a_ticket_is_given_up_if_the_decode_worker_left_before_it_got_the_ticket(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, ended, bring, lost = await make_rig(Script(), num_decode=2), list[Ticket](), Attempts._bring, []

    async def end(ticket: Ticket) -> None:
        ended.append(ticket)

    async def lookup(*args: Any) -> dict[str, int]:
        return {}

    async def bringing(self: Attempts, *args: Any) -> None:  # a copy takes a while
        await bring(self, *args)
        if not lost:
            lost.append(session := args[2].session)
            await rig.scripted[1 + int(session.record.worker_id[1:])].stop()
            await until(lambda: not session.connected)

    rig.workers.use_ledgers(lookup, end)
    monkeypatch.setattr(Attempts, "_bring", bringing)
    await run(rig, prompt=TextPrompt("the mill"), max_tokens=5)
    assert len(rig.script.prefilled) == 2 and len(rig.script.submitted) == 1
    await until(lambda: len(ended) == 1)


@pytest.mark.parametrize("is_whole", [True, False], ids=["run", "prefill"])
async def test_a_prefill_that_is_cancelled_has_used_its_tokens(make_rig: MakeRig, is_whole: bool) -> None:
    rig, used = await make_rig(Script(prefills=[30.0])), list[tuple[str, int]]()
    rig.runner._used = lambda tenant, num_tokens: used.append((tenant, num_tokens))
    request = await rig.validator.resolve(Wanted(prompt=IdsPrompt(list(range(5, 305))), max_tokens=5), "a")
    outlet = Outlet(lambda deltas: None)
    task = asyncio.ensure_future(rig.runner.run(request, outlet) if is_whole else rig.runner.prefill(request))
    await until(lambda: bool(rig.script.prefilled))
    task.cancel()
    await asyncio.wait({task})
    assert used == [("a", 300)]
