"""The gateway sends the deployment's secret to its workers. If a worker rejects it, the client gets no authentication
error.
"""

from __future__ import annotations

import logging

import pytest

from common.access import Door
from common.errors import Unavailable
from common.trust import Trust
from gateway.fleet.decode_client import DecodeSession
from gateway.fleet.liveness import LivenessLimits
from testing.gateway.parts import Script
from testing.gateway.scripted_workers import ScriptedWorker
from tests.gateway.conftest import MakeRig
from tests.gateway.test_requests import PROMPT, expected_ids, ids_of, run, until

SECRET = "0123456789abcdef"


async def test_workers_that_ask_for_the_secret_are_shown_it(make_rig: MakeRig) -> None:
    rig = await make_rig(secret=SECRET)
    assert ids_of(await run(rig)) == expected_ids(PROMPT, 12)


async def test_a_decode_worker_that_refuses_gets_no_session(caplog: pytest.LogCaptureFixture) -> None:
    worker = ScriptedWorker("decode", "d0", Script(), SECRET)
    session = DecodeSession(
        await worker.start(), lambda worker_id, load: None, LivenessLimits(), Trust("that of another")
    )
    session.start()
    await until(lambda: session.ended)
    assert "session with decode worker d0 ended: UNAUTHENTICATED" in caplog.text and SECRET not in caplog.text
    await worker.stop()


async def test_a_prefill_worker_that_refuses_is_no_401(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig = await make_rig(secret=SECRET, recover_s=0.2)
    door = rig.scripted[0].server._protection.door
    assert isinstance(door, Door)
    door._secret = b"that of another launch"
    with caplog.at_level(logging.ERROR), pytest.raises(Unavailable):
        await run(rig)
    assert "prefill worker p0 refuses this gateway" in caplog.text
