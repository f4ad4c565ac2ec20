"""Runs a group of services as child processes: starts them, restarts a service that ends, and ends them in order.

This module does not decide which services a group has. `children` handles the processes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from block_store.errors import RedisUnusable
from block_store.redis.private_redis import PrivateServer
from common.errors import StartupError
from looseleaf.serve.children import Child, ChildDied, Echo, Restarts, ServiceSpec, end, own_line
from looseleaf.serve.placement import child_environment, threads_per_worker
from looseleaf.serve.restart_notice import RestartNotice
from looseleaf.serve.service_flags import inside_flags, with_values
from looseleaf.serve.settings import ServeSettings
from looseleaf.serve.shm import ROOT, SharedDirectory
from looseleaf.serve.standby import NAME, PACKAGE, Standby, wanted

FAILED_GRACE_S = 3.0
"""Time in seconds that each service has to end after the group could not be started."""
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


class ServiceGroup:
    """The owner of the processes of a group. A subclass starts the services. Call `check` from time to time, and `stop`
    at the end.
    """

    def __init__(self, settings: ServeSettings, echo: Echo) -> None:
        self._settings = settings
        self._log_format = settings.log_format
        self._echo = echo
        self._say: Echo = lambda line: echo(own_line(line, settings.log_format))
        self._children: list[Child] = []
        self._shared: SharedDirectory | None = None
        self._run_directory: SharedDirectory | None = None
        self._redis: PrivateServer | None = None
        self._restarts = Restarts()
        self._notice = RestartNotice()
        self._standby: Standby | None = None

    def _make_directories(self) -> None:
        """Creates the directory in shared memory, and the directory of ready files."""
        self._shared = SharedDirectory(Path(self._settings.directory) if self._settings.directory else ROOT)
        self._run_directory = SharedDirectory(Path(tempfile.gettempdir()))
        self._notice.file = self._runs / "restarting"

    @property
    def _directory(self) -> Path:
        """The group's directory in shared memory."""
        assert self._shared is not None
        return self._shared.path

    @property
    def _runs(self) -> Path:
        """The directory of ready files, on disk."""
        assert self._run_directory is not None
        return self._run_directory.path

    def _start_redis(self, tcp: tuple[str, int] | None = None) -> str:
        """Starts the group's private Redis, which keeps running when the block store is restarted. With `tcp`, it also
        listens on this address and port. Returns the URL of its Unix socket.
        """
        try:
            self._redis = PrivateServer(
                self._directory,
                tcp=tcp,
                may_restart=lambda: self._restarts.allow("redis"),
                tell=lambda line: self._say(f"looseleaf: {line}"),
            )
        except RedisUnusable as error:
            raise StartupError(str(error)) from None
        return self._redis.url

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
        place = "split" if settings.roles == "split" else "both"
        spec = replace(self._spec(NAME, PACKAGE, [*flags, "--place", place]), takes_orders=True)
        self._standby = Standby(lambda: self._child(spec), lambda: self._restarts.allow(NAME), self._say)
        self._standby.check()

    def _spawn(self, name: str, package: str, flags: Sequence[str], extra: Mapping[str, str] | None = None) -> Child:
        child = self._child(self._spec(name, package, flags, extra))
        self._children.append(child)
        return child

    def _spec(
        self, name: str, package: str, flags: Sequence[str], extra: Mapping[str, str] | None = None
    ) -> ServiceSpec:
        assert self._shared is not None
        environment = child_environment(os.environ, name, threads_per_worker(self._settings)) | dict(extra or {})
        environment.setdefault("KERNELS_CHOICES", str(self._runs))
        inside = inside_flags(self._settings, self._secret_file)
        return ServiceSpec(name, package, (*flags, *inside), environment, self._shared.lock_fd, self._log_format)

    def _child(self, spec: ServiceSpec) -> Child:
        return Child(spec, self._runs, self._echo)

    @property
    def _spare(self) -> list[Child]:
        child = None if self._standby is None else self._standby.child
        return [] if child is None else [child]

    def _keep_ports(self, lines: Mapping[str, tuple[str, ...]]) -> None:
        """Adds the ports to the flags of services that must keep them after a restart. `lines` are the ready lines of
        all services, by name.
        """
        for child in self._children:
            addresses = zip(_PORT_FLAGS.get(child.name, ()), lines[child.name], strict=False)
            ports = {flag: address.rpartition(":")[2] for flag, address in addresses}
            child.spec = replace(child.spec, flags=with_values(child.spec.flags, ports))

    @property
    def _secret_file(self) -> Path:
        """The file with the secret of the group's internal calls."""
        return self._directory / "secret"

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each service, by name."""
        return {child.name: child.pid for child in self._children}

    @property
    def states(self) -> dict[str, str]:
        """The state of each service, by name: starting or ready."""
        return {child.name: "starting" if child.ready_lines() is None else "ready" for child in list(self._children)}

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
        others = ("gateway", "block_store")
        gateway, store = ([child for child in self._children if child.name == name] for name in others)
        workers = [child for child in self._children if child.name not in others]
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
            self._run_directory.close()
