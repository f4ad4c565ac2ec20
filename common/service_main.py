"""Runs the process of a service, with its settings, logs and event loop. If the service cannot start, prints the
reason.

A worker's process serves one `Role`, or prefill and decode together.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from common.access import Door
from common.errors import LooseleafError, StartupError
from common.rpc import Protection, RpcServer, reachable_address, wait_for_signal, write_ready_file
from common.settings import ServerSettings, WorkerSettings
from common.telemetry import LogFormat, configure_logging
from common.trust import is_loopback, trust_of

S = TypeVar("S", bound=ServerSettings)
logger = logging.getLogger("trust")
_LAST_MESSAGES_S = 0.5
"""Seconds that open streams get after the drain to send the tokens that have already been produced."""


class Role(Protocol):
    """The interface of one role of a worker's process. `serve_roles` calls each method at most once, and calls
    `announce`, `withdraw` and `close`, which may block, in other threads.
    """

    weights_bytes: int
    """Bytes of the weights that the role has loaded, or 0 if a different role of the process has loaded them."""

    def add_to(self, server: RpcServer) -> None:
        """Registers the role's service."""

    def start(self, on_failure: Callable[[], object]) -> None:
        """Starts the step thread. `on_failure` is called, possibly in a different thread, when an exception has ended
        the step thread or the role has lost its arena.
        """

    def announce(self, address: str) -> None:
        """Publishes `address` (host:port), so that gateways find the role."""

    def withdraw(self) -> None:
        """Makes gateways stop sending new requests to the role."""

    async def drain(self, timeout_s: float) -> None:
        """Refuses new work, and allows running work at most `timeout_s` to finish. A decode role then rejects the
        remaining groups, so that gateways continue them elsewhere.
        """

    def close(self, timeout_s: float) -> None:
        """Ends the step thread, and waits at most `timeout_s` for a running step. Gives up all blocks if the thread has
        ended without an exception.
        """


def internal_server(settings: ServerSettings) -> RpcServer:
    """Returns a server for calls within the deployment. Raises StartupError if other machines could reach the server
    and no secret is required, or if a file of credentials cannot be used.
    """
    trust = trust_of(settings)
    door = None if trust.secret is None else Door(trust.secret)
    if door is None and not is_loopback(settings.host):
        raise StartupError(f"--host {settings.host} can be reached from other machines: it needs a --secret-file")
    if door is None:
        logger.warning("no --secret-file: every process on this machine may make internal calls")
    if trust.certificates is None and not is_loopback(settings.host):
        logger.warning("--host %s without --tls-cert: internal calls are not encrypted", settings.host)
    credentials = None if trust.certificates is None else trust.certificates.server_credentials()
    return RpcServer(settings.host, settings.port, protection=Protection(door, credentials, settings.reflection))


async def serve_roles(settings: WorkerSettings, server: RpcServer, roles: Sequence[Role]) -> None:
    """Serves `roles` until a signal arrives, or until a role fails. After a failure, the process ends with status 1."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for role in roles:
        role.add_to(server)
        role.start(lambda: loop.call_soon_threadsafe(stop.set))
    await server.start()
    address = settings.advertise or reachable_address(settings.host, server.port)
    await _at_once(lambda role: role.announce(address), roles)
    await server.set_ready(True)
    weights_bytes = sum(role.weights_bytes for role in roles)
    write_ready_file(settings.ready_file, [f"{settings.host}:{server.port}", str(weights_bytes)])
    failed = await wait_for_signal(stop)
    await _at_once(lambda role: role.withdraw(), roles)
    if not failed:
        await asyncio.gather(*(role.drain(settings.drain_s) for role in roles))
    await server.stop(_LAST_MESSAGES_S)
    await _at_once(lambda role: role.close(settings.drain_s), roles)
    if failed:
        sys.exit(1)


async def _at_once(call: Callable[[Role], None], roles: Sequence[Role]) -> None:
    await asyncio.gather(*(asyncio.to_thread(call, role) for role in roles))


async def wait_idle(busy: Callable[[], object], timeout_s: float) -> None:
    """Waits until `busy()` is false, for at most `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while busy() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)


def run_service(name: str, settings_type: type[S], main: Callable[[S], Awaitable[None]]) -> None:
    """Runs `main(settings)`. A StartupError or LooseleafError ends the process with status 1, and its message is
    printed or, with JSON logs, logged.

    The garbage collector ignores the objects that exist when this function begins (`gc.freeze`), because visiting them
    would delay tokens.
    """
    gc.freeze()
    settings = settings_type.load(sys.argv[1:])
    configure_logging(settings.log_level, settings.log_format, service=name)

    async def supervised() -> None:
        await main(settings)

    try:
        asyncio.run(supervised())
    except (StartupError, LooseleafError) as error:
        _tell_failure(name, error, settings.log_format)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        logging.shutdown()


def _tell_failure(name: str, error: Exception, log_format: LogFormat) -> None:
    if log_format == "json":
        logging.getLogger(name).critical("%s", error)
    else:
        print(f"{name}: {error}", file=sys.stderr)


def worker_name(role: str, given: str | None) -> str:
    """Returns the name given to the worker, or a new name. A new name has a random part, because a container's host
    name and process id may be the same after a restart.
    """
    return given or f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
