"""Runs the HTTP server, and contains the code that HTTP and gRPC share: binding ports, limits on connections,
readiness, and the drain at shutdown. It also keeps the metrics of workers and blocks up to date.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from common.certificates import CertificateFiles, front_context_watch
from common.errors import StartupError
from common.rpc import PUBLIC, Bounds, RpcServer, host_port, wait_for_signal
from common.telemetry import fallback_counts
from common.trust import NO_TRUST, Trust
from gateway.admission.open_answers import OpenAnswers
from gateway.api.http_protocol import DEFAULT_BOUNDS, BoundedHttp, HttpBounds
from gateway.fleet.block_counts import BlockCounter
from gateway.fleet.workers import Workers
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings

logger = logging.getLogger("gateway")
READY_POLL_S = 0.1
INSPECT_POLL_S = 1.0
CERTIFICATE_POLL_S = 1.0
BACKLOG = 2048
OTHER_FILES = 512
LAST_WORDS_S = 2.0
"""The time in seconds that clients have to read the last event of an answer that the drain has ended."""


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handlers, on a socket that has already been bound."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        bounds: HttpBounds = DEFAULT_BOUNDS,
        certificates: CertificateFiles | None = None,
    ) -> None:
        """`certificates` enables HTTPS. A new connection uses the certificates that were loaded last.

        Wrong keys are counted by the connection's own address; X-Forwarded-For is ignored.
        """
        protocol: Any = partial(BoundedHttp, bounds)
        files: Any = (
            {} if certificates is None else {"ssl_certfile": certificates.cert, "ssl_keyfile": certificates.key}
        )
        super().__init__(
            uvicorn.Config(
                app, loop="none", http=protocol, ws="none", lifespan="off", access_log=False, log_config=None,
                server_header=False, backlog=BACKLOG, proxy_headers=False,
                timeout_keep_alive=bounds.keep_alive_s, **files,
            )
        )  # fmt: skip
        self._certificates = certificates
        logging.getLogger("uvicorn").setLevel(logging.ERROR)  # uvicorn logs every client that does not send HTTP
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def start(self) -> None:
        self._task = asyncio.create_task(self.serve(sockets=[self._sock]), name="http")
        while not self.started and not self._task.done():
            await asyncio.sleep(0.01)

    async def watch_certificates(self) -> None:
        """Reloads the certificates when they change, until cancelled. Returns at once if no certificates are
        configured.
        """
        if self._certificates is None or self.config.ssl is None:
            return
        look = front_context_watch(self._certificates, self.config.ssl)
        while True:
            await asyncio.sleep(CERTIFICATE_POLL_S)
            await asyncio.to_thread(look)

    async def stop(self, grace_s: float) -> None:
        """Closes the port and allows running answers `grace_s` seconds to finish."""
        if self._task is None:
            return
        self.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._task), grace_s)
        self.force_exit = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def announce_shutdown(servers: Sequence[RpcServer], seconds: float) -> None:
    """Makes the servers' health checks fail, and waits for `seconds` seconds while the gateway continues to serve, so
    that load balancers stop sending requests to it. A second signal ends the wait.
    """
    await _set_ready(servers, False)
    if seconds:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wait_for_signal(asyncio.Event()), seconds)


async def drain(answers: OpenAnswers, servers: Sequence[RpcServer | HttpServer], seconds: float) -> None:
    """Closes the ports, gives running answers `seconds` seconds to finish, and ends the remaining answers with an
    error.
    """
    timer = asyncio.get_running_loop().call_later(seconds, answers.end)
    await asyncio.gather(*(server.stop(seconds + LAST_WORDS_S) for server in servers))
    timer.cancel()


def bind_http(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Returns a bound socket. With `reuse_port`, other sockets that also set it may share the port.

    Raises StartupError if the socket cannot be bound, for example because the port is occupied.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given; without it, each keep-alive answer waits 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == 98:  # EADDRINUSE
            raise StartupError(f"port {port} is occupied; give another --port") from None
        raise StartupError(f"cannot listen on {host_port(host, port)} (--host, --port): {error.strerror}") from None
    sock.setblocking(False)
    return sock


def bind_grpc(server: RpcServer, port: int) -> None:
    try:
        server.bind()
    except StartupError:
        raise StartupError(
            f"port {port} is occupied or the address does not belong to this machine; give another --grpc-port"
        ) from None


def raise_file_limit() -> int:
    """Raises this process's soft limit on open files to its hard limit, because every connection is an open file.
    Returns the soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def most_connections(settings: GatewaySettings, max_files: int) -> int:
    """Returns the limit on connections, for HTTP and for gRPC each. The limit leaves `OTHER_FILES` files for other
    purposes, unless `max_files` is too small.
    """
    return max(1, min(settings.max_connections, (max_files - OTHER_FILES) // 2))


def http_bounds(settings: GatewaySettings, max_files: int) -> HttpBounds:
    connections = most_connections(settings, max_files)
    return HttpBounds(connections, settings.max_header_bytes, settings.header_timeout_s, settings.keep_alive_s)


def grpc_bounds(settings: GatewaySettings, max_files: int) -> Bounds:
    return replace(PUBLIC, rpcs=settings.max_concurrent_rpcs, connections=most_connections(settings, max_files))


async def watch_readiness(
    is_ready: Callable[[], bool],
    servers: Sequence[RpcServer],
    wake: Callable[[], None],
    on_ready: Callable[[], None],
    is_leaving: asyncio.Event,
) -> None:
    """Keeps the health services of the gRPC servers up to date until cancelled. Calls `on_ready` when the gateway is
    ready for the first time, and `wake` at every poll, because workers may have more room.
    """
    was_ready = told = False
    while True:
        ready = is_ready() and not is_leaving.is_set()
        if ready != was_ready:
            if not is_leaving.is_set():
                logger.info("ready" if ready else "no pair of prefill and decode workers is ready")
            await _set_ready(servers, ready)
            was_ready = ready
        if ready and not told:
            told = True
            on_ready()
        wake()
        await asyncio.sleep(READY_POLL_S)


async def _set_ready(servers: Sequence[RpcServer], ready: bool) -> None:
    for server in servers:
        await server.set_ready(ready)


async def watch_blocks(address: str | None, workers: Workers, metrics: Metrics, trust: Trust = NO_TRUST) -> None:
    """Keeps the metrics of blocks, workers, drafts and fallbacks up to date for /metrics until cancelled. Counts the
    blocks of the block store at `address`, or, if `address` is None, of the arenas of all workers.
    """
    counter = BlockCounter(trust)
    try:
        while True:
            metrics.set_workers(
                (s.record.worker_id, s.record.role, s.load.num_running, s.load.num_waiting)
                for s in workers.states.values()
            )
            loads = {s.record.worker_id: s.load for s in workers.states.values()}
            metrics.set_drafts({worker: load.drafts for worker, load in loads.items() if load.drafts is not None})
            by_address = {s.record.address: s.record.fallbacks for s in workers.states.values()}
            metrics.set_fallbacks({"gateway": fallback_counts(), **by_address})
            metrics.set_blocks(await counter.count(workers.stores.addresses if address is None else [address]))
            await asyncio.sleep(INSPECT_POLL_S)
    finally:
        await counter.close()
