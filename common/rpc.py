"""Provides the gRPC server of every service, with health and reflection, and channels to other services.

`common.guard` runs before every method of a server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from common import reflection_v1
from common.access import Door
from common.certificates import INSIDE_NAME, Stamp
from common.errors import StartupError
from common.guard import Check, Guard, anybody
from common.trust import NO_TRUST, Trust

MAX_MESSAGE_BYTES = 64 << 20
SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),
    # A service that has died is back within seconds, but by default gRPC's pauses between attempts grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_INSIDE_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", INSIDE_NAME)]
IDLE_S = 60.0
"""Time in seconds without a call after which a channel is closed, if its pool is not told which addresses are wanted. A
channel to a server that has vanished would try to connect forever.
"""
HEARTBEAT_S = 0.5
"""Longest pause that a worker's event loop makes between two messages on an open stream. A frozen process sends
nothing.
"""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of a server, which also apply to unauthenticated callers. None means gRPC's default."""

    message_bytes: int = MAX_MESSAGE_BYTES
    rpcs: int | None = None
    """Maximum number of concurrent calls on the server. Further calls are refused."""
    streams: int | None = None
    """Maximum number of concurrent calls on one connection. Further calls wait at the client."""
    handshake_s: float | None = None
    """Time from the start of a connection to its first bytes of HTTP/2."""
    idle_s: float | None = None
    """Time that a connection may be without calls."""
    connections: int | None = None
    """Maximum number of concurrent connections. Further connections are closed before anything is read from them."""

    def options(self) -> dict[str, int]:
        """Returns those limits that are options of a gRPC server."""
        given = {
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.max_concurrent_streams": self.streams,
            "grpc.server_handshake_timeout_ms": None if self.handshake_s is None else round(self.handshake_s * 1000),
            "grpc.max_connection_idle_ms": None if self.idle_s is None else round(self.idle_s * 1000),
            "grpc.max_allowed_incoming_connections": self.connections,
        }
        return {name: value for name, value in given.items() if value is not None}


INSIDE = Bounds()
PUBLIC = Bounds(message_bytes=4 << 20, rpcs=4096, streams=1024, handshake_s=10.0, idle_s=300.0, connections=4096)


@dataclass(frozen=True, slots=True)
class Protection:
    """The access check, the encryption, the reflection and the limits of a server."""

    door: Door | None = None
    """None admits all callers, unless a service itself requires credentials."""
    credentials: grpc.ServerCredentials | None = None
    """None means that connections are not encrypted."""
    reflection: bool = True
    bounds: Bounds = INSIDE


class RpcServer:
    """A grpc.aio server with health (`Watch` included) and, by default, reflection. `port` is known after `bind`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        check: Check = anybody,
        protection: Protection = Protection(),
    ) -> None:
        """Creates the server. With `reuse_port`, other servers that also set it may listen on the same port, so that a
        successor can take over. `check` is called before each call.
        """
        self._address = host_port(host, port)
        options = {**dict(SERVER_OPTIONS), **protection.bounds.options(), "grpc.so_reuseport": int(reuse_port)}
        interceptors = [Guard(check)] if protection.door is None else [protection.door, Guard(check)]
        self._server = grpc.aio.server(
            options=list(options.items()),
            interceptors=interceptors,
            maximum_concurrent_rpcs=protection.bounds.rpcs,
        )
        self._protection = protection
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        self.port = 0

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: Any, service_name: str) -> None:
        """Registers a servicer with its generated `add_XServicer_to_server` and full service name."""
        add_to_server(servicer, self._server)
        self._names.append(service_name)

    def bind(self) -> None:
        """Binds the port. Raises StartupError if the server cannot listen there. Connections wait until `start` is
        called.
        """
        try:
            if (credentials := self._protection.credentials) is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, credentials)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise StartupError(
                f"cannot listen on {self._address}: the port is occupied or the address does not belong to this machine"
            )

    async def start(self) -> None:
        """Starts serving, but does not report that the service is ready. Binds first if `bind` has not been called."""
        if self.port == 0:
            self.bind()
        if self._protection.reflection:
            self._add_reflection()
        await self.set_ready(False)
        await self._server.start()

    def _add_reflection(self) -> None:
        servicer = reflection.aio.ReflectionServicer((*self._names, reflection_v1.SERVICE_NAME))
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, self._server)
        reflection_v1.add_reflection_v1(servicer, self._server)

    async def set_ready(self, ready: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names[2:]]:
            await self._health.set(name, state)

    async def stop(self, grace_s: float) -> None:
        """Informs health watchers, refuses new calls, and allows running calls `grace_s` seconds to finish."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def open_channel(address: str, trust: Trust = NO_TRUST, options: Sequence[tuple[str, int]] = ()) -> grpc.aio.Channel:
    """Returns a channel that notices a frozen or vanished peer in about 5 s. `options` are added to
    `CHANNEL_OPTIONS`.
    """
    if trust.certificates is None:
        return grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *options])
    credentials = trust.certificates.channel_credentials()
    return grpc.aio.secure_channel(address, credentials, options=[*_INSIDE_OPTIONS, *options])


def open_blocking_channel(address: str, trust: Trust = NO_TRUST) -> grpc.Channel:
    """Returns a channel for blocking calls, with the options of `open_channel`."""
    if trust.certificates is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, trust.certificates.channel_credentials(), options=_INSIDE_OPTIONS)


@dataclass(slots=True)
class _Pooled:
    channel: grpc.aio.Channel
    stamp: Stamp
    """Version of the certificates that the channel uses."""
    num_uses: int = 0
    used_at: float = 0.0
    """Time, by `time.monotonic`, of the end of the last use."""


class ChannelPool:
    """A pool with one channel per address, which concurrent calls to the address share."""

    def __init__(self, trust: Trust = NO_TRUST, options: Sequence[tuple[str, int]] = ()) -> None:
        """`options` are added to `CHANNEL_OPTIONS`."""
        self._trust = trust
        self._options = options
        self._pooled: dict[str, _Pooled] = {}

    @contextmanager
    def use(self, address: str) -> Iterator[grpc.aio.Channel]:
        """A context manager that yields the channel to an address. `keep` does not close the channel while it is in
        use.
        """
        pooled = self._pooled.get(address)
        if pooled is None:
            stamp = self._trust.stamp
            pooled = self._pooled[address] = _Pooled(open_channel(address, self._trust, self._options), stamp)
        pooled.num_uses += 1
        try:
            yield pooled.channel
        finally:
            pooled.num_uses -= 1
            pooled.used_at = time.monotonic()

    async def keep(self, addresses: Iterable[str] | None = None) -> None:
        """Closes the unused channels that use old certificates, and the unused channels to addresses that `addresses`
        does not contain. If `addresses` is None, closes the channels that have not been used for IDLE_S seconds
        instead.
        """
        if addresses is None:
            oldest = time.monotonic() - IDLE_S
            addresses = [address for address, pooled in self._pooled.items() if pooled.used_at >= oldest]
        wanted, stamp = set(addresses), self._trust.stamp
        idle = [(address, pooled) for address, pooled in self._pooled.items() if not pooled.num_uses]
        stale = [a for a, pooled in idle if a not in wanted or (stamp and pooled.stamp != stamp)]
        channels = [self._pooled.pop(address).channel for address in stale]  # before other tasks run
        for channel in channels:
            await channel.close()

    async def close(self) -> None:
        for pooled in self._pooled.values():
            await pooled.channel.close()
        self._pooled.clear()


async def wait_for_signal(failed: asyncio.Event) -> bool:
    """Waits for SIGTERM or SIGINT, and then returns False. If `failed` is set first, returns True."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return failed.is_set()


def host_port(host: str, port: int) -> str:
    """Returns an address of the form host:port, in which an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def reachable_address(host: str, port: int) -> str:
    """Returns the address to announce for a server that is bound to `host`. If the server listens on every interface,
    the address contains this machine's name.
    """
    return host_port(socket.gethostname() if host in ("", "0.0.0.0", "::", "[::]") else host, port)


def write_ready_file(path: str | None, lines: Sequence[str]) -> None:
    """Atomically writes `lines` to the file that tells the parent process that this process is ready. Does nothing if
    `path` is None.
    """
    if path is None:
        return
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    os.replace(temporary, path)
