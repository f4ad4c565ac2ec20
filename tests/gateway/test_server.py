"""The sockets of a gateway, used by one gateway or shared by two that allow it, and the metrics of other processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from common.errors import StartupError
from common.rpc import RpcServer
from gateway.api.server import bind_http, watch_blocks
from tests.gateway.conftest import MakeRig


def test_a_port_is_shared_only_by_those_who_say_so() -> None:
    with bind_http("127.0.0.1", 0, reuse_port=True) as first:
        port = first.getsockname()[1]
        bind_http("127.0.0.1", port, reuse_port=True).close()
        with pytest.raises(StartupError):
            bind_http("127.0.0.1", port)


async def test_so_is_the_port_of_grpc() -> None:
    servers = [RpcServer("127.0.0.1", 0, reuse_port=True)]
    servers[0].bind()
    servers.append(RpcServer("127.0.0.1", servers[0].port, reuse_port=True))
    servers[1].bind()
    assert servers[1].port == servers[0].port
    alone = RpcServer("127.0.0.1", servers[0].port)
    with pytest.raises(StartupError):
        alone.bind()
    for server in (*servers, alone):
        await server.stop(0)


async def test_fallbacks_of_workers_are_metrics_while_they_are_there(make_rig: MakeRig) -> None:
    rig = await make_rig(num_decode=2)

    def noted(service: str = "") -> float:
        return rig.metric(f'looseleaf_fallbacks{{fallback="elsewhere",model_name="tiny",service="{service}')

    async def becomes(count: float) -> None:
        async with asyncio.timeout(60):
            while noted() != count:
                await asyncio.sleep(0.05)

    for index, count in ((0, 3), (1, 4)):
        rig.records[index] = replace(rig.records[index], fallbacks={"elsewhere": count})
    watching = asyncio.create_task(watch_blocks(None, rig.workers, rig.metrics))
    await becomes(7)
    assert noted(rig.records[1].address) == 4
    del rig.records[1]
    await becomes(3)
    watching.cancel()


def test_a_gateway_starts_without_what_only_workers_need() -> None:
    """A restart must be fast, because clients wait for it."""
    code = "import sys, gateway.__main__; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
