"""Runs every service on this machine: block store, workers, gateway, as child processes that end together.

Knows the services' flags and in which order they start and stop; `looseleaf.children` knows how a process is kept.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from common.errors import StartupError
from common.trust import write_secret
from looseleaf.children import Child, ChildDied, Echo, ServiceSpec, end, wait_ready
from looseleaf.model_source import ModelSource, resolve
from looseleaf.placement import by_turns, child_environment, describe, settled, threads_per_worker, worker_processes
from looseleaf.settings import ServeSettings
from looseleaf.shm import ROOT, SharedDirectory

_FAILED_GRACE_S = 3.0
_WORKER_PACKAGES = ("prefill_svc", "decode_svc", "looseleaf.worker")
_MAX_RESTARTS = 5
_RESTART_WINDOW_S = 60.0
"""A worker that ends more often than `_MAX_RESTARTS` times in so many seconds ends the launch."""
_WORKER_SETTINGS = (
    "dtype", "load_format", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "seed", "device",
    "attention_backend", "attention_library", "deterministic", "enforce_eager", "kv_cache_dtype",
    "gpu_memory_utilization",
)  # fmt: skip
"""What `serve` passes on to its workers by the same name."""
_TINY_BLOCKS = 4096
"""KV blocks for the small random model: 65,536 tokens, a few megabytes."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a launch listens, as host:port that a client on this machine reaches."""

    http: str
    grpc: str
    block_store: str
    services: Mapping[str, str]
    """The gRPC address of every service, by its name; each answers the health service."""
    notice: str | None = None
    """What the user should know about the model."""


def echo_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Launcher:
    """One launch. `start`, then `check` now and then, then `stop`; or as a context manager."""

    def __init__(self, settings: ServeSettings, echo: Echo = echo_to_stderr) -> None:
        self._settings = settings
        self._echo = echo
        self._children: list[Child] = []
        self._shared: SharedDirectory | None = None
        self._run_directory: Path | None = None
        self._restarts: dict[str, list[float]] = {}

    def start(self) -> Addresses:
        """Start every service; returns when the gateway serves. Raises StartupError and leaves nothing running."""
        try:
            return self._start()
        except BaseException:
            self.stop(_FAILED_GRACE_S)
            raise

    def _start(self) -> Addresses:
        asked, settings = self._settings, settled(self._settings)
        self._settings = settings
        source = resolve(settings.model or settings.model_directory, dummy=settings.load_format == "dummy")
        if source.notice:
            self._echo(source.notice)
        for port in (settings.port, settings.grpc_port):
            check_port_free(settings.host, port)
        self._shared = SharedDirectory(Path(settings.directory) if settings.directory else ROOT)
        write_secret(self._secret_file)
        self._run_directory = Path(tempfile.mkdtemp(prefix="looseleaf-run-"))
        self._echo(describe(asked, settings))
        # Workers beside the store: who needs its address, or Redis', waits for it itself.
        store = self._spawn("block_store", "block_store", store_flags(settings, self._shared.path, source))
        store_address, redis_url = store.later(0), store.later(1)
        assert self._run_directory is not None
        flags = worker_flags(settings, source, store_address)
        if by_turns(settings):
            flags += flags_of({"turns_file": self._run_directory / "turns"})
        for name, package in worker_processes(settings):
            by_role = [] if package == "prefill_svc" else decode_flags(settings)
            self._spawn(name, package, [*flags, *by_role, "--worker-id", name])
        # Workers take longest to start, so the gateway leaves them the cores while the store starts.
        wait_ready([store], self._children, settings.startup_timeout_s)
        self._spawn("gateway", "gateway", gateway_flags(settings, source, store_address, redis_url), api_key(settings))
        ready = wait_ready(self._children, self._children, settings.startup_timeout_s)
        return self._addresses(ready, source.notice)

    def _addresses(self, ready: Sequence[tuple[str, ...]], notice: str | None) -> Addresses:
        """From the ready lines of all services; the gateway's are HTTP, then gRPC."""
        lines = {child.name: lines for child, lines in zip(self._children, ready, strict=True)}
        http, grpc_address = map(reachable, lines["gateway"])
        services = {name: reachable(line[0]) for name, line in lines.items()} | {"gateway": grpc_address}
        return Addresses(http, grpc_address, services["block_store"], services, notice)

    def _spawn(self, name: str, package: str, flags: Sequence[str], extra: Mapping[str, str] | None = None) -> Child:
        assert self._shared is not None
        environment = child_environment(os.environ, name, threads_per_worker(self._settings)) | dict(extra or {})
        inside = flags_of({"secret_file": self._secret_file})
        child = self._child(ServiceSpec(name, package, (*flags, *inside), environment, self._shared.lock_fd))
        self._children.append(child)
        return child

    def _child(self, spec: ServiceSpec) -> Child:
        assert self._run_directory is not None
        return Child(spec, self._run_directory, self._echo)

    @property
    def _secret_file(self) -> Path:
        """With what all internal calls of this launch must show. Beside the arena: who can write there need not ask."""
        assert self._shared is not None
        return self._shared.path / "secret"

    @property
    def pids(self) -> dict[str, int]:
        """The process of each service, by name."""
        return {child.name: child.pid for child in self._children}

    def check(self) -> None:
        """Start workers that have ended again. Raise ChildDied if another service has, or a worker keeps dying.

        KV outlives a worker, and the gateway sends its requests elsewhere or waits; nothing else can be replaced yet.
        """
        for index, child in enumerate(self._children):
            try:
                child.check()
            except ChildDied as died:
                if not self._may_restart(child.spec):
                    raise
                self._echo(f"looseleaf: {str(died).splitlines()[0]} starting it again")
                self._children[index] = self._child(child.spec)

    def _may_restart(self, spec: ServiceSpec) -> bool:
        if spec.package not in _WORKER_PACKAGES:
            return False
        now = time.monotonic()
        recent = [at for at in self._restarts.get(spec.name, ()) if now - at < _RESTART_WINDOW_S]
        self._restarts[spec.name] = [*recent, now]
        return len(recent) < _MAX_RESTARTS

    def kill(self) -> None:
        """SIGKILL to every service, for whoever does not want to wait for `stop`."""
        for child in self._children:
            child.kill()

    def stop(self, grace_s: float | None = None) -> None:
        """End the services from the gateway down to the block store; a second call does nothing."""
        grace_s = self._settings.grace_s if grace_s is None else grace_s
        store, workers, gateway = self._children[:1], self._children[1:-1], self._children[1:][-1:]
        for layer in (gateway, workers, store):
            end(layer, grace_s)
        self._children.clear()
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


def flags_of(values: Mapping[str, object | None]) -> list[str]:
    """{"max_queue": 5, "seed": None, "enforce_eager": True} as ["--max-queue", "5", "--enforce-eager"]."""
    flags: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return flags


def store_flags(settings: ServeSettings, directory: Path, source: ModelSource) -> list[str]:
    """Flags of `python -m block_store`."""
    tiny_default = _TINY_BLOCKS if source.is_tiny and settings.memory_budget is None else None
    return flags_of(
        {
            "host": "127.0.0.1",
            "port": 0,
            "directory": directory,
            "redis_url": settings.redis_url,
            "expect_workers": settings.prefill + settings.decode,
            "memory_budget": settings.memory_budget,
            "num_blocks": settings.num_blocks or tiny_default,
            "device": settings.device,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "log_level": settings.log_level,
        }
    )


def worker_flags(settings: ServeSettings, source: ModelSource, block_store: str) -> list[str]:
    """Flags of `python -m prefill_svc`, `python -m decode_svc` and `python -m looseleaf.worker`."""
    return flags_of(
        {
            "model": source.directory,
            "host": "127.0.0.1",
            "port": 0,
            "block_store": block_store,
            "num_threads": threads_per_worker(settings),
            "log_level": settings.log_level,
            **{name: getattr(settings, name) for name in _WORKER_SETTINGS},
        }
    )


def decode_flags(settings: ServeSettings) -> list[str]:
    """Flags that only workers take which decode."""
    return flags_of({"preemption": settings.preemption, "swap_space": settings.swap_space})


def gateway_flags(settings: ServeSettings, source: ModelSource, block_store: str, redis_url: str) -> list[str]:
    """Flags of `python -m gateway`."""
    names = ("host", "port", "grpc_port", "max_model_len", "max_queue", "max_queue_wait", "api_key_file", "log_level")
    return flags_of(
        {
            "model": source.directory,
            "served_model_name": settings.served_model_name or source.directory.name,
            "block_store": block_store,
            "redis_url": redis_url,
            **{name: getattr(settings, name) for name in names},
        }
    )


def api_key(settings: ServeSettings) -> dict[str, str]:
    """The credential as a variable: flags can be read by every user of the machine."""
    return {} if settings.api_key is None else {"LOOSELEAF_GATEWAY_API_KEY": settings.api_key}


def check_port_free(host: str, port: int) -> None:
    """Raise StartupError if nobody could listen there now; port 0 is always free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise StartupError(f"host {host!r} cannot be resolved: {error.strerror}") from error
    except OSError as error:
        raise StartupError(f"port {port} on {host} cannot be had ({error.strerror}); choose another port") from error


def reachable(address: str) -> str:
    """`host:port` as a client on this machine reaches it."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host in ("0.0.0.0", "[::]", "::", "") else address
