"""Runs the services of a launch on this machine: the block store, the workers, the gateway and, unless the user gives
the URL of a Redis server, a private Redis.

Defines the order in which they start. `service_group` restarts and ends the services, and `service_flags` builds their
flags.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from common.secret_files import write_secret
from looseleaf.serve.addresses import check_ports_free, reachable
from looseleaf.serve.children import Echo, wait_ready
from looseleaf.serve.model_source import resolve
from looseleaf.serve.placement import by_turns, describe, settled, worker_processes
from looseleaf.serve.service_flags import (
    flags_of,
    gateway_flags,
    gateway_secrets,
    salt_secret,
    store_flags,
    store_secrets,
    vllm_grpc_ports,
    with_values,
    worker_flags,
)
from looseleaf.serve.service_group import FAILED_GRACE_S, ServiceGroup
from looseleaf.serve.service_variables import check_variables
from looseleaf.serve.settings import ServeSettings
from looseleaf.serve.standby import WORKER


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses, each in the form host:port, at which a client on this machine can reach a launch."""

    http: str
    grpc: str
    block_store: str
    services: Mapping[str, str]
    """The gRPC address of every service, by name. All services answer health checks."""
    vllm_grpc: tuple[str, ...] = ()
    """The addresses of vLLM's protocol for whole requests, prefill and decode, or none if it is not served."""
    is_tls: bool = False
    """Whether HTTP and gRPC for clients use TLS."""
    notice: str | None = None
    """A note about the model for the user, or None."""


def echo_to_stderr(line: str) -> None:
    """Prints a log line. Drops it if nobody reads the log any more, which must not end the launch."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class Launcher(ServiceGroup):
    """The owner of the processes of one launch. Call `start`, then `check` from time to time, and `stop` at the end."""

    def __init__(self, settings: ServeSettings, echo: Echo = echo_to_stderr) -> None:
        super().__init__(settings, echo)

    def start(self) -> Addresses:
        """Starts every service. Returns when the gateway serves requests. If a service does not start, stops everything
        and raises StartupError.
        """
        try:
            return self._start()
        except BaseException:
            self.stop(FAILED_GRACE_S)
            raise

    def _start(self) -> Addresses:
        asked = self._settings
        self._settings = settings = settled(asked)
        processes = worker_processes(settings)
        check_variables(["block_store", "gateway", *{package for _, package in processes}])
        source = resolve(settings.model or settings.model_directory, dummy=settings.load_format == "dummy")
        if source.notice:
            self._say(source.notice)
        check_ports_free(settings.host, settings.port, settings.grpc_port)
        check_ports_free(settings.vllm_grpc_host, *vllm_grpc_ports(settings))
        self._make_directories()
        write_secret(self._secret_file)
        self._say(describe(asked, settings))
        # Workers start in parallel with the store; a service that needs the store's address waits for it.
        redis_url = settings.redis_url or self._start_redis()
        flags = store_flags(settings, self._directory, source)
        store = self._spawn("block_store", "block_store", flags, store_secrets(redis_url))
        store_address = store.later(0)
        turns = flags_of({"turns_file": self._runs / "turns"}) if by_turns(settings) else []
        for name, package in processes:
            flags = worker_flags(settings, source, store_address, package)
            self._spawn(name, package, [*flags, *turns, "--worker-id", name])
        # Workers take longest to start, so the gateway leaves them the cores while the store starts.
        wait_ready([store], self._children, settings.startup_timeout_s)
        own = {"restarts_file": self._notice.file, "expect_workers": settings.prefill + settings.decode}
        flags = gateway_flags(settings, source, store_address) + flags_of(own)
        secrets = gateway_secrets(settings, redis_url, salt_secret(settings))
        gateway = self._spawn("gateway", "gateway", flags, secrets)
        ready = wait_ready(self._children, self._children, settings.startup_timeout_s)
        # If the gateway is restarted, it serves with the workers that are there. Others may be restarting too.
        gateway.spec = replace(gateway.spec, flags=with_values(gateway.spec.flags, {"--expect-workers": "1"}))
        self._stand_by(worker_flags(settings, source, store_address, WORKER), weights_bytes=int(ready[1][1]))
        return self._addresses(ready, source.notice)

    def _addresses(self, ready: Sequence[tuple[str, ...]], notice: str | None) -> Addresses:
        """Reads the addresses from the ready lines of all services, and adds the ports to the flags of services that
        must keep them after a restart. The gateway's lines are the addresses of HTTP, of gRPC and of vLLM's protocol.
        """
        lines = {child.name: lines for child, lines in zip(self._children, ready, strict=True)}
        self._keep_ports(lines)
        http, grpc_address, *vllm_grpc = map(reachable, lines["gateway"])
        services = {name: reachable(line[0]) for name, line in lines.items()} | {"gateway": grpc_address}
        return Addresses(http, grpc_address, services["block_store"], services, tuple(vllm_grpc), self._is_tls, notice)

    @property
    def _is_tls(self) -> bool:
        return self._settings.ssl_certfile is not None

    def reload(self) -> None:
        """Makes the gateway read its key file again."""
        for child in self._children:
            if child.spec.package == "gateway":
                child.hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
