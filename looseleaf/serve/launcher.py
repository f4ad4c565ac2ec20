"""Runs the services of a launch on this machine: the block store, the workers, the gateway and, unless the user gives
the URL of a Redis server, a private Redis.

Defines the order in which they start and stop, and restarts a service that ends. `children` handles the processes, and
`service_flags` builds their flags.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from block_store.errors import RedisUnusable
from block_store.redis.private_redis import PrivateServer
from common.errors import StartupError
from common.secret_files import write_secret
from looseleaf.serve.addresses import check_ports_free, reachable
from looseleaf.serve.children import Child, ChildDied, Echo, Restarts, ServiceSpec, end, own_line, wait_ready
from looseleaf.serve.model_source import resolve
from looseleaf.serve.placement import (
    by_turns,
    child_environment,
    describe,
    settled,
    threads_per_worker,
    worker_processes,
)
from looseleaf.serve.restart_notice import RestartNotice
from looseleaf.serve.service_flags import (
    flags_of,
    gateway_flags,
    gateway_secrets,
    inside_flags,
    salt_secret,
    store_flags,
    store_secrets,
    vllm_grpc_ports,
    with_ports,
    worker_flags,
)
from looseleaf.serve.service_variables import check_variables
from looseleaf.serve.settings import ServeSettings
from looseleaf.serve.shm import ROOT, SharedDirectory
from looseleaf.serve.standby import NAME, PACKAGE, WORKER, Standby, wanted

_FAILED_GRACE_S = 3.0
_ENDING_S = 5.0
"""Time that a service gets beyond the grace period of its requests, to inform the clients of the remaining requests and
to end.
"""
_PORT_FLAGS = {
    "block_store": ("--port",),
    "gateway": (
        "--port", "--grpc-port", "--vllm-grpc-port", "--vllm-grpc-prefill-port", "--vllm-grpc-decode-port",
    ),
}  # fmt: skip
"""The flags that correspond to the lines of a ready file, for services that must keep their addresses."""


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
    print(line, file=sys.stderr, flush=True)


class Launcher:
    """The owner of the processes of one launch. Call `start`, then `check` from time to time, and `stop` at the end."""

    def __init__(self, settings: ServeSettings, echo: Echo = echo_to_stderr) -> None:
        self._settings = settings
        self._log_format = settings.log_format
        self._echo = echo
        self._say: Echo = lambda line: echo(own_line(line, settings.log_format))
        self._children: list[Child] = []
        self._shared: SharedDirectory | None = None
        self._run_directory: Path | None = None
        self._redis: PrivateServer | None = None
        self._restarts = Restarts()
        self._notice = RestartNotice()
        self._standby: Standby | None = None

    def start(self) -> Addresses:
        """Starts every service. Returns when the gateway serves requests. If a service does not start, stops everything
        and raises StartupError.
        """
        try:
            return self._start()
        except BaseException:
            self.stop(_FAILED_GRACE_S)
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
        self._shared = SharedDirectory(Path(settings.directory) if settings.directory else ROOT)
        write_secret(self._secret_file)
        self._run_directory = Path(tempfile.mkdtemp(prefix="looseleaf-run-"))
        self._notice.file = self._run_directory / "restarting"
        self._say(describe(asked, settings))
        # Workers start in parallel with the store; a service that needs the store's address waits for it.
        redis_url = settings.redis_url or self._start_redis()
        flags = store_flags(settings, self._shared.path, source)
        store = self._spawn("block_store", "block_store", flags, store_secrets(redis_url))
        store_address = store.later(0)
        assert self._run_directory is not None
        turns = flags_of({"turns_file": self._run_directory / "turns"}) if by_turns(settings) else []
        for name, package in processes:
            flags = worker_flags(settings, source, store_address, package)
            self._spawn(name, package, [*flags, *turns, "--worker-id", name])
        # Workers take longest to start, so the gateway leaves them the cores while the store starts.
        wait_ready([store], self._children, settings.startup_timeout_s)
        flags = gateway_flags(settings, source, store_address) + flags_of({"restarts_file": self._notice.file})
        self._spawn("gateway", "gateway", flags, gateway_secrets(settings, redis_url, salt_secret(settings)))
        ready = wait_ready(self._children, self._children, settings.startup_timeout_s)
        self._stand_by(worker_flags(settings, source, store_address, WORKER), weights_bytes=int(ready[1][1]))
        return self._addresses(ready, source.notice)

    def _stand_by(self, flags: Sequence[str], weights_bytes: int) -> None:
        """Starts a spare worker if `standby.wanted` decides so. `flags` are those of a worker."""
        from block_store.server.sizing import (
            available_memory,  # imported here, so that services are started before numpy is loaded
        )

        settings = self._settings
        has_one, why = wanted(settings, weights_bytes, available_memory())
        self._say(f"looseleaf: {'a' if has_one else 'no'} spare worker ({why})")
        if not has_one:
            return
        place = "both" if settings.roles == "both" else "split"
        spec = replace(self._spec(NAME, PACKAGE, [*flags, "--place", place]), takes_orders=True)
        self._standby = Standby(lambda: self._child(spec), lambda: self._restarts.allow(NAME), self._say)
        self._standby.check()

    def _addresses(self, ready: Sequence[tuple[str, ...]], notice: str | None) -> Addresses:
        """Reads the addresses from the ready lines of all services, and adds the ports to the flags of services that
        must keep them after a restart. The gateway's lines are the addresses of HTTP, of gRPC and of vLLM's protocol.
        """
        lines = {child.name: lines for child, lines in zip(self._children, ready, strict=True)}
        for child in self._children:
            ports = dict(zip(_PORT_FLAGS.get(child.name, ()), lines[child.name], strict=False))
            child.spec = replace(child.spec, flags=with_ports(child.spec.flags, ports))
        http, grpc_address, *vllm_grpc = map(reachable, lines["gateway"])
        services = {name: reachable(line[0]) for name, line in lines.items()} | {"gateway": grpc_address}
        return Addresses(http, grpc_address, services["block_store"], services, tuple(vllm_grpc), self._is_tls, notice)

    def _start_redis(self) -> str:
        """Starts the launch's private Redis, which keeps running when the block store is restarted. Returns its URL."""
        assert self._shared is not None
        try:
            self._redis = PrivateServer(
                self._shared.path,
                may_restart=lambda: self._restarts.allow("redis"),
                tell=lambda line: self._say(f"looseleaf: {line}"),
            )
        except RedisUnusable as error:
            raise StartupError(str(error)) from None
        return self._redis.url

    def _spawn(self, name: str, package: str, flags: Sequence[str], extra: Mapping[str, str] | None = None) -> Child:
        child = self._child(self._spec(name, package, flags, extra))
        self._children.append(child)
        return child

    def _spec(
        self, name: str, package: str, flags: Sequence[str], extra: Mapping[str, str] | None = None
    ) -> ServiceSpec:
        assert self._shared is not None
        environment = child_environment(os.environ, name, threads_per_worker(self._settings)) | dict(extra or {})
        environment.setdefault("KERNELS_CHOICES", str(self._run_directory))
        inside = inside_flags(self._settings, self._secret_file)
        return ServiceSpec(name, package, (*flags, *inside), environment, self._shared.lock_fd, self._log_format)

    def _child(self, spec: ServiceSpec) -> Child:
        assert self._run_directory is not None
        return Child(spec, self._run_directory, self._echo)

    @property
    def _spare(self) -> list[Child]:
        child = None if self._standby is None else self._standby.child
        return [] if child is None else [child]

    @property
    def _is_tls(self) -> bool:
        return self._settings.ssl_certfile is not None

    @property
    def _secret_file(self) -> Path:
        """The file with the secret of this launch's internal calls."""
        assert self._shared is not None
        return self._shared.path / "secret"

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each service, by name."""
        return {child.name: child.pid for child in self._children}

    @property
    def spare_pids(self) -> list[int]:
        """The process ids of spare workers, loaded or not."""
        return [child.pid for child in self._spare]

    @property
    def spare_is_loaded(self) -> bool:
        """Whether a worker that dies now can be replaced at once."""
        return self._standby is not None and self._standby.is_loaded

    def check(self) -> None:
        """Restarts services that have ended. Raises ChildDied if a service keeps ending.

        A thread restarts the private Redis; this method only raises its failure.
        """
        if self._redis is not None and self._redis.failure is not None:
            raise ChildDied(str(self._redis.failure))
        for index, child in enumerate(self._children):
            try:
                child.check()
            except ChildDied as died:
                if not self._restarts.allow(child.name):
                    raise
                self._children[index] = self._replacement(child.spec, str(died).partition(";")[0])
        self._notice.check()
        if self._standby is not None:
            self._standby.check()

    def _replacement(self, spec: ServiceSpec, death: str) -> Child:
        child = None if self._standby is None else self._standby.take_place(spec)
        what = "starting it again" if child is None else "the spare worker takes its place"
        self._say(f"looseleaf: {death}; {what}")
        return self._notice.add(child or self._child(spec))

    def reload(self) -> None:
        """Makes the gateway read its key file again."""
        for child in self._children:
            if child.spec.package == "gateway":
                child.hang_up()

    def kill(self) -> None:
        """Sends SIGKILL to every service and to the private Redis, for callers that do not wait for `stop`."""
        for child in [*self._children, *self._spare]:
            child.kill()
        if self._redis is not None:
            self._redis.kill()

    def stop(self, most_s: float | None = None) -> None:
        """Ends the spare worker, the gateway, the workers, the store and the private Redis, in this order. Kills a
        service, other than Redis, that is still running `most_s` seconds after SIGTERM (default: the sum of the drain
        delay, the grace period and `_ENDING_S`). A second call does nothing.
        """
        if most_s is None:
            most_s = self._settings.drain_delay + self._settings.grace_s + _ENDING_S
        store, workers, gateway = self._children[:1], self._children[1:-1], self._children[1:][-1:]
        for layer in (self._spare, gateway, workers, store):
            end(layer, most_s)
        self._children.clear()
        self._standby = None
        if self._redis is not None:
            self._redis.close()
            self._redis = None
        if self._shared is not None:
            self._shared.close()
        if self._run_directory is not None:
            shutil.rmtree(self._run_directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
