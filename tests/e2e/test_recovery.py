"""Workers that are killed with SIGKILL during streams: there is a pause, but no token changes and no block
stays held.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from looseleaf import LLM, AsyncClient
from looseleaf.llm import serve_settings
from looseleaf.serve.launcher import Launcher
from testing.streams import run_streams
from testing.system import assert_nothing_held, prompts, wait_for

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.1, "max_tokens": 300, "ignore_eos": True},
]
PROMPTS = prompts(12, seed=21, lengths=(5, 120))


async def run(llm: LLM, *, salt: str, disturb: Callable[[], None] = lambda: None) -> list[tuple[int, ...]]:
    return await run_streams(llm.addresses.grpc, PROMPTS, OPTIONS, salt=salt, disturb=disturb)


@pytest.mark.parametrize("roles,workers", [("split", 1), ("split", 2), ("both", 1)])
async def test_killed_workers_cost_no_token(checkpoint: Path, roles: str, workers: int) -> None:
    """With one worker per role, the streams wait for its replacement. With two, they continue at once. If a process
    with both roles dies, unclaimed tickets and their prompts are lost with it.
    """
    settings = {"num_blocks": 4096, "max_model_len": 1024, "roles": roles, "prefill": workers, "decode": workers}
    with LLM(str(checkpoint), **settings) as llm:
        expected = await run(llm, salt="undisturbed")
        first = {1: "", 2: "-0"}[workers]
        for name in ("worker",) if roles == "both" else ("decode", "prefill"):
            pid = llm.pids[name + first]
            kill = partial(os.kill, pid, signal.SIGKILL)
            assert await run(llm, salt=name, disturb=kill) == expected, name
            wait_for(lambda n=name: llm.pids[n + first], lambda now, old=pid: now != old, 60, "not started again")
        assert (await run(llm, salt="afterwards")) == expected
        assert_nothing_held(llm.addresses.block_store)


class Orchestrated(Launcher):
    """A launch whose gateway is not told of restarts, and whose dead worker is started only when the test says so."""

    def start_again(self, name: str) -> None:
        index = list(self.pids).index(name)
        self._children[index] = self._child(self._children[index].spec)


async def test_a_request_waits_for_a_worker_that_an_orchestrator_restarts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOSELEAF_GATEWAY_AWAIT_WORKERS", "true")
    monkeypatch.setenv("LOOSELEAF_GATEWAY_RECOVER_S", "0.5")
    settings = serve_settings(str(checkpoint), {"num_blocks": 4096, "max_model_len": 1024, "roles": "split"})
    with Orchestrated(settings, lambda line: None) as launcher:
        async with AsyncClient(launcher.start().grpc) as client:
            expected = (await client.generate(PROMPTS[0], **OPTIONS[0])).token_ids
            os.kill(launcher.pids["decode"], signal.SIGKILL)
            late = asyncio.create_task(client.generate(PROMPTS[0], **OPTIONS[0]))
            await asyncio.sleep(6.0)
            assert not late.done(), "more than ten times as long as without --await-workers"
            launcher.start_again("decode")
            assert (await late).token_ids == expected


async def test_a_gateway_that_restarts_does_not_wait_for_a_worker_that_is_down(checkpoint: Path) -> None:
    options = {"num_blocks": 4096, "max_model_len": 1024, "roles": "both", "prefill": 2, "decode": 2}
    with Orchestrated(serve_settings(str(checkpoint), options), lambda line: None) as launcher:
        addresses = launcher.start()
        async with AsyncClient(addresses.grpc) as client:
            before = await client.generate(PROMPTS[0], **OPTIONS[0])
            assert len((await client.explain(before.request_id))[0].attempts[0].prefill_considered) == 2
        for name in ("worker-0", "gateway"):
            os.kill(launcher.pids[name], signal.SIGKILL)
        launcher.start_again("gateway")
        health = partial(httpx.get, f"http://{addresses.http}/health", timeout=60)
        wait_for(lambda: status_of(health), lambda status: status == 200, 60, "not ready again")
        async with AsyncClient(addresses.grpc) as client:
            assert (await client.generate(PROMPTS[0], **OPTIONS[0])).token_ids == before.token_ids


def status_of(get: Callable[[], httpx.Response]) -> int | None:
    """Returns the status of the response, or None if there is no server."""
    try:
        return get().status_code
    except httpx.TransportError:
        return None


@pytest.mark.parametrize("name", ["decode", "prefill", "worker"])
async def test_a_worker_that_sleeps_past_its_lease_wakes_up_fenced_and_costs_no_token(
    checkpoint: Path, name: str
) -> None:
    """A worker that is stopped for 7 s is reaped, because the lease is 5 s. When it wakes, it gives up all blocks and
    registers again. "worker" hosts both roles.
    """
    roles = "both" if name == "worker" else "split"
    with LLM(str(checkpoint), num_blocks=4096, max_model_len=1024, roles=roles) as llm:
        expected = await run(llm, salt="undisturbed")

        def freeze() -> None:
            os.kill(llm.pids[name], signal.SIGSTOP)
            time.sleep(7.0)
            os.kill(llm.pids[name], signal.SIGCONT)

        pid = llm.pids[name]
        assert await run(llm, salt="frozen", disturb=freeze) == expected
        health = f"http://{llm.addresses.http}/health"
        wait_for(lambda: httpx.get(health, timeout=60).status_code, lambda status: status == 200, 60, "not ready again")
        assert await run(llm, salt="afterwards") == expected
        assert llm.pids[name] == pid, "the worker should have survived"
        assert_nothing_held(llm.addresses.block_store)
