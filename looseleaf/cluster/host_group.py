"""The services of one host of a deployment: a block store and its workers, as child processes of this process."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import StartupError
from common.secret_files import write_secret
from looseleaf.cluster.plan import ROLES, HostPlan
from looseleaf.cluster.shared import Shared
from looseleaf.serve.children import Child, Echo, wait_ready
from looseleaf.serve.model_source import ModelSource, resolve
from looseleaf.serve.placement import by_turns
from looseleaf.serve.service_flags import flags_of, store_flags, store_secrets, with_values, worker_flags
from looseleaf.serve.service_group import ServiceGroup
from looseleaf.serve.service_variables import check_variables
from looseleaf.serve.settings import ServeSettings
from looseleaf.serve.standby import WORKER

DRAIN_S = 20.0
"""Time in seconds that a worker has to end after it has been removed. It drains for 10 s by default."""
_CONNECT_S = 2.0


class HostGroup(ServiceGroup):
    """The owner of the processes of a host. One thread must make all calls, except those of properties."""

    def __init__(self, shared: Shared, plan: HostPlan, address: str, echo: Echo) -> None:
        """`address` is the node's address, on which the services listen."""
        super().__init__(_host_settings(shared, plan), echo)
        self.plan = plan
        self._deployment = shared
        self._address = address
        self._source: ModelSource | None = None
        self._leaving: list[tuple[Child, float]] = []
        """Removed workers that have not ended yet, and the times at which they are killed."""

    @property
    def name(self) -> str:
        return f"host-{self.plan.index}"

    def start(self) -> None:
        """Starts the block store and the workers. Returns when they are ready. Raises StartupError if a service does
        not start; call `stop` in this case too.
        """
        settings = self._settings
        check_variables(["block_store", "prefill_svc", "decode_svc"])
        self._source = resolve(settings.model or settings.model_directory, dummy=settings.load_format == "dummy")
        redis_url = self._deployment.redis_url
        _wait_for_redis(redis_url, settings.startup_timeout_s)
        self._make_directories()
        write_secret(self._secret_file, self._deployment.secret)
        transport = self._deployment.settings().transport
        flags = store_flags(settings, self._directory, self._source, host=self._address, transport=transport)
        self._spawn("block_store", "block_store", flags, store_secrets(redis_url))
        for role in ROLES:
            for number in range(self.plan.count(role)):
                self._start_worker(f"{role}-{number}", f"{role}_svc")
        ready = wait_ready(self._children, self._children, settings.startup_timeout_s)
        self._keep_ports({child.name: lines for child, lines in zip(self._children, ready, strict=True)})
        self._stand_by(self._worker_flags(WORKER), weights_bytes=int(ready[1][1]))

    def _worker_flags(self, package: str) -> list[str]:
        assert self._source is not None
        store_address = self._children[0].later(0)
        return worker_flags(self._settings, self._source, store_address, package, host=self._address)

    def _start_worker(self, name: str, package: str) -> None:
        turns = flags_of({"turns_file": self._runs / "turns"}) if by_turns(self._settings) else []
        self._spawn(name, package, [*self._worker_flags(package), *turns, "--worker-id", f"{self.name}-{name}"])

    def resize(self, plan: HostPlan) -> None:
        """Starts the missing workers, and asks the surplus ones to drain and end. Does not wait for either."""
        store = self._children[0]
        if plan.num_workers:
            store.spec = replace(
                store.spec, flags=with_values(store.spec.flags, {"--expect-workers": str(plan.num_workers)})
            )
        wanted = [f"{role}-{number}" for role in ROLES for number in range(plan.count(role))]
        for child in self._children[1:]:
            if child.name not in wanted:
                self._children.remove(child)
                child.terminate()
                self._leaving.append((child, time.monotonic() + DRAIN_S))
                self._say(f"looseleaf: {self.name}: {child.name} drains and ends")
        for name in wanted:
            if name not in self.pids:
                self._start_worker(name, f"{name.partition('-')[0]}_svc")
        self.plan = plan

    def check(self) -> None:
        """Restarts services that have ended, and kills removed workers that have not ended in time."""
        super().check()
        for child, until in self._leaving:
            if child.status is None and time.monotonic() > until:
                child.kill()
        self._leaving = [(child, until) for child, until in self._leaving if child.status is None]

    def stop(self, most_s: float | None = None) -> None:
        for child, _ in self._leaving:
            child.kill()
        super().stop(most_s)

    @property
    def states(self) -> dict[str, str]:
        """The state of each service, by name: starting, ready or draining."""
        return super().states | {f"{child.name} (removed)": "draining" for child, _ in list(self._leaving)}


def _host_settings(shared: Shared, plan: HostPlan) -> ServeSettings:
    """Returns the settings of a host's launch. Hosts on the same node must not share a cache on disk."""
    settings = shared.settings()
    kv_disk_dir = settings.kv_disk_dir.expanduser() / f"host-{plan.index}"
    changes: Mapping[str, object] = {
        "prefill": plan.prefill, "decode": plan.decode, "threads": shared.threads, "roles": "split", "device": "cpu",
        "kv_disk_dir": Path(kv_disk_dir),
    }  # fmt: skip
    return settings.model_copy(update=changes)


def _wait_for_redis(url: str, seconds: float) -> None:
    """Waits until a server accepts connections at the URL, because a store that finds no Redis ends. Raises
    StartupError after `seconds`.
    """
    parts = urlsplit(url)
    if parts.hostname is None or parts.scheme.endswith("+sentinel"):  # a Unix socket, or one of several addresses
        return
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((parts.hostname, parts.port or 6379), timeout=_CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                where = f"{parts.hostname}:{parts.port or 6379}"
                raise StartupError(f"Redis at {where} cannot be reached from this node: {error}") from None
        time.sleep(0.1)
