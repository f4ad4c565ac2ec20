"""Starts the block store (`python -m block_store --directory DIR`): builds its objects, and serves until a signal
arrives.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from block_store import operator_file
from block_store.errors import BlockStoreError
from block_store.operator_file import OperatorFile
from block_store.redis import redis_server
from block_store.redis.password import with_password
from block_store.redis.redis_server import RedisHandle
from block_store.server.arena_owner import ArenaOwner, DirectoryLock
from block_store.server.pulls import Pulls
from block_store.server.service import BlockStoreServicer
from block_store.server.sources import source_of
from block_store.settings import BlockStoreSettings
from block_store.transfer import frames
from block_store.transfer.byte_server import ByteServer
from block_store.transfer.nixl_agent import NixlAgent
from common.errors import StartupError
from common.rpc import reachable_address, wait_for_signal, write_ready_file
from common.service_main import internal_server, run_service
from common.tracing import tracer_of
from common.trust import files_of, trust_of


async def serve(settings: BlockStoreSettings, redis: RedisHandle) -> None:
    """Serves until a signal arrives, and then cleans up."""
    server = internal_server(settings)
    server.bind()
    tracer = tracer_of("block_store", reachable_address(settings.host, server.port))
    owner = ArenaOwner(settings, redis, settings.advertise or reachable_address(settings.host, server.port))
    agents = AsyncExitStack()
    try:
        sent, read = await _nixl_agents(settings, agents)
        await asyncio.to_thread(owner.find)
        trust = trust_of(settings)
        pulls = Pulls(owner, trust, read) if settings.pull_blocks else None
        channels = ByteServer(settings.host, settings.byte_port, trust, partial(source_of, owner))
        if settings.byte_port:
            channels.listen()  # so that the store does not start if the port is occupied
        servicer = BlockStoreServicer(
            owner, settings.expect_workers, settings.attach_timeout_s, pulls, channels.listen, tracer, sent
        )
        server.add(frames.add_to_server, servicer, frames.SERVICE)
        address, directory = f"{settings.host}:{server.port}", Path(settings.directory)
        operator_file.write(directory, OperatorFile(address, redis.url, files_of(settings)))
        await server.start()
        await server.set_ready(True)
        write_ready_file(settings.ready_file, [address])
        await wait_for_signal(asyncio.Event())
        channels.close()
        await server.stop(1.0)
        if pulls is not None:
            await pulls.close()
    finally:
        await agents.aclose()
        await asyncio.to_thread(tracer.close)
        operator_file.remove(Path(settings.directory))
        await asyncio.to_thread(owner.close)


async def _nixl_agents(
    settings: BlockStoreSettings, stack: AsyncExitStack
) -> tuple[NixlAgent | None, NixlAgent | None]:
    """Starts the NIXL agents from which other hosts read blocks and which reads them from other hosts. Each has a
    process of its own, so that a failed read, for which a process is killed, disturbs no other host. Returns None for
    those that the settings do not ask for. Raises StartupError if NIXL cannot be used.
    """
    wanted = (settings.transport == "nixl", settings.transport == "nixl" and settings.pull_blocks)
    sent, read = [NixlAgent(over_tcp=settings.nixl_over_tcp) if each else None for each in wanted]
    for agent in filter(None, (sent, read)):
        await stack.enter_async_context(agent)
    return sent, read


async def main(settings: BlockStoreSettings) -> None:
    lock = DirectoryLock(Path(settings.directory))
    try:
        url, password_file = settings.redis_url, settings.redis_password_file
        redis = redis_server.connect(url and with_password(url, password_file), settings.directory)
        try:
            await serve(settings, redis)
        finally:
            redis.close()
    except BlockStoreError as error:
        raise StartupError(str(error)) from error
    finally:
        lock.close()


if __name__ == "__main__":
    run_service("block_store", BlockStoreSettings, main)
