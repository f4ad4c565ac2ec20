"""Sockets of a gateway: taken by one, or shared by two that both say so."""

from __future__ import annotations

import pytest

from common.errors import StartupError
from common.rpc import RpcServer
from gateway.server import bind_http


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
