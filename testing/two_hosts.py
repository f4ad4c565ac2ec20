"""Runs two hosts on one machine, with prefill and a gateway on host A, decode on host B, and one or two Redis servers.

With namespaces (only as root), each host has its own network, mounts and shared memory. A veth pair joins the two
hosts, and the test acts as a third machine that is connected to A. Without namespaces, the hosts are two groups of
processes with an arena each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import grpc

from common.rpc import open_blocking_channel
from common.secret_files import write_secret
from common.trust import TrustFiles
from looseleaf import metrics_page
from looseleaf.serve.child import later
from looseleaf.serve.service_flags import flags_of
from protos.v1 import block_store_pb2 as pb
from protos.v1 import block_store_pb2_grpc
from testing.chaos.redis_process import RedisProcess
from testing.system import wait_for

START_S = 120.0
NOTES = "LOOSELEAF_CHAOS_NOTES"
"""The environment variable with the directory of the files that control a `testing.chaos.faulty_store`."""
B_SERVICES = ("store-b", "decode-b")
_SUBNET = f"10.77.{os.getpid() % 256}"  # so that two test processes can run at the same time
LINK = (f"{_SUBNET}.1", f"{_SUBNET}.2")  # A, B
_FRONT = (f"{_SUBNET}.5", f"{_SUBNET}.6")  # the test, A


class Namespace:
    """A network namespace and a mount namespace with a separate /dev/shm. Commands enter them through a process that
    sleeps for an hour.
    """

    def __init__(self, name: str) -> None:
        self.name = f"ll-{name}-{os.getpid()}"
        _run("ip", "netns", "add", self.name)
        self._interfaces: list[str] = []
        mounts = "mount -t tmpfs tmpfs /dev/shm && echo up && exec sleep 3600"
        self._holder = subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "-m", "sh", "-c", mounts], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "up\n"
        self.enter = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", f"--mount=/proc/{self._holder.pid}/ns/mnt"]
        _run(*self.enter, "ip", "link", "set", "lo", "up")

    def take(self, interface: str, address: str) -> None:
        """Moves one end of a veth pair into the namespace and gives it an address."""
        self._interfaces.append(interface)
        _run("ip", "link", "set", interface, "netns", self.name)
        _run(*self.enter, "ip", "addr", "add", f"{address}/30", "dev", interface)
        _run(*self.enter, "ip", "link", "set", interface, "up")

    def kill_all(self) -> None:
        """Sends SIGKILL to every process of the namespace, as a loss of power would end them."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> set[int]:
        """Returns the ids of the processes that have been started in the namespace."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return set(map(int, listed.stdout.split())) - {self._holder.pid}

    def close(self) -> None:
        """Removes the namespace and its links. The kernel removes the links of a deleted namespace some time later, and
        until then nothing else can have the names and routes of their other ends.
        """
        for interface in self._interfaces:
            with contextlib.suppress(subprocess.CalledProcessError):  # the link's other end has been removed
                _run("ip", "-n", self.name, "link", "del", interface)
        self._holder.kill()
        self._holder.wait()
        _run("ip", "netns", "del", self.name)


def namespaces_work() -> bool:
    """Returns whether this process can create network namespaces."""
    probe = f"ll-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
    except (OSError, subprocess.CalledProcessError):
        return False
    _run("ip", "netns", "del", probe)
    return True


def joined_namespaces() -> tuple[Namespace, Namespace]:
    """Returns two namespaces that are joined by a link, with the addresses LINK. The calling process reaches both."""
    with contextlib.ExitStack() as undo:
        a, b = (undo.enter_context(contextlib.closing(Namespace(name))) for name in "ab")
        _link(f"lla{os.getpid()}", f"llb{os.getpid()}")
        a.take(f"lla{os.getpid()}", LINK[0])
        b.take(f"llb{os.getpid()}", LINK[1])
        _link(f"llt{os.getpid()}", f"llf{os.getpid()}")
        a.take(f"llf{os.getpid()}", _FRONT[1])
        _run("ip", "addr", "add", f"{_FRONT[0]}/30", "dev", f"llt{os.getpid()}")
        _run("ip", "link", "set", f"llt{os.getpid()}", "up")
        # The calling process also reaches B, through A.
        _run("ip", "route", "add", f"{LINK[1]}/32", "via", _FRONT[1])
        _run("ip", "route", "add", f"{LINK[0]}/32", "via", _FRONT[1])
        _run(*a.enter, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        _run(*b.enter, "ip", "route", "add", f"{_FRONT[0]}/32", "via", LINK[0])
        undo.pop_all()
    return a, b


def _link(end: str, other: str) -> None:
    _run("ip", "link", "add", end, "type", "veth", "peer", "name", other)


class Process:
    """A service process of one host."""

    def __init__(
        self, name: str, command: Sequence[str], ready: Path, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.ready = ready
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env=environment,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> list[str]:
        deadline = time.monotonic() + START_S
        while not self.ready.exists():
            assert self._process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.05)
        return self.ready.read_text().split()

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, grace_s: float = 10.0) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class TwoHosts:
    """A running stack on two hosts. It starts at construction and ends with `close`."""

    def __init__(
        self, model: Path, *, namespaces: bool, redis_per_host: bool = False, num_blocks: int = 1024,
        max_model_len: int = 1024, packages: Mapping[str, str] | None = None,
        flags: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:  # fmt: skip
        """Starts the stack. `packages` maps the names of services' packages to replacements. `flags` contains further
        settings, by the kind of service ("store", "prefill", "decode" or "gateway") or by its name ("store-a").
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="ll-hosts-")
        self._root = Path(self._scratch.name)
        self._shm = Path(tempfile.mkdtemp(prefix="ll-hosts-", dir="/dev/shm"))
        self._packages = packages or {}
        self._further = dict(flags or {})
        self.notes = self._root / "notes"
        """The directory of the files that control a `testing.chaos.faulty_store`."""
        self.notes.mkdir()
        self._model, self._max_model_len, self._num_blocks = model, max_model_len, num_blocks
        self._secret = self._root / "secret"
        write_secret(self._secret)
        self.spaces: tuple[Namespace, Namespace] | None = None
        self.redis = RedisProcess(self._root)
        self.redis_of_b = self.redis
        """The Redis server that stores host B's ledger."""
        if redis_per_host:
            (self._root / "b").mkdir()
            self.redis_of_b = RedisProcess(self._root / "b")
        self.processes: dict[str, Process] = {}
        try:
            if namespaces:
                self.spaces = joined_namespaces()
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for name in ("store-a", "store-b", "prefill-a", "decode-b"):
            self.start(name)
        self.block_stores = tuple(map(self.wait_for_store, ("store-a", "store-b")))
        for name in ("prefill-a", "decode-b"):
            self.processes[name].wait_ready()
        self._start_gateway()

    def _start_gateway(self) -> None:
        self.start("gateway-a")
        ports = [line.rpartition(":")[2] for line in self.processes["gateway-a"].wait_ready()]
        front = _FRONT[1] if self.spaces else "127.0.0.1"
        self.http, self.grpc = (f"{front}:{port}" for port in ports)

    def wait_for_store(self, name: str) -> str:
        """Waits until a block store is ready. Returns its address."""
        [listens] = self.processes[name].wait_ready()
        return str(self._further.get(name, {}).get("advertise", listens))

    def restart_gateway(self, flags: Mapping[str, object]) -> None:
        """Replaces the gateway with one that has these further settings."""
        self.processes["gateway-a"].end()
        self._further["gateway"] = flags
        self._start_gateway()

    def start(self, name: str) -> Process:
        """Starts or restarts a service, without waiting until it is ready."""
        kind, _, host = name.rpartition("-")
        ready = self._root / f"{name}.ready"
        ready.unlink(missing_ok=True)
        package = {"store": "block_store", "prefill": "prefill_svc", "decode": "decode_svc", "gateway": "gateway"}[kind]
        enter = [] if self.spaces is None else self.spaces["ab".index(host)].enter
        package = self._packages.get(package, package)
        flags = {"secret_file": self._secret, "ready_file": ready, **self._flags(kind, host)}
        flags |= {**self._further.get(kind, {}), **self._further.get(name, {})}
        command = [*enter, sys.executable, "-m", "looseleaf.serve.child", str(os.getpid()), package, *flags_of(flags)]
        self.processes[name] = Process(name, command, ready, self._root / f"{name}.log", self.environment)
        return self.processes[name]

    def _flags(self, kind: str, host: str) -> dict[str, object]:
        address = "127.0.0.1" if self.spaces is None else LINK["ab".index(host)]
        store = later(self._root / f"store-{host}.ready", 0)
        if kind == "store":
            return {
                "host": address, "port": 0, "directory": self._shm / host,
                "redis_url": (self.redis if host == "a" else self.redis_of_b).url,
                "expect_workers": 1, "num_blocks": self._num_blocks, "device": "cpu", "pull_blocks": True,
                "keep_arena": True,
            }  # fmt: skip
        if kind == "gateway":
            front = "127.0.0.1" if self.spaces is None else "0.0.0.0"
            urls = dict.fromkeys([self.redis.url, self.redis_of_b.url])
            return {
                "host": front, "port": 0, "grpc_port": 0, "model": self._model, "redis_url": ",".join(urls),
                "poll_s": 0.2,
            }  # fmt: skip
        return {
            "host": address, "port": 0, "model": self._model, "block_store": store, "num_threads": 1,
            "max_model_len": self._max_model_len, "worker_id": f"{kind}-{host}", "device": "cpu",
            "max_num_batched_tokens": 128,
        }  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the services. PYTHONPATH is set because `testing` is not installed. Workers
        agree on their kernels, because a worker that is restarted on a busy machine may measure that others are faster.
        """
        own = {NOTES: str(self.notes), "PYTHONPATH": str(Path(__file__).parents[1])}
        return {"KERNELS_CHOICES": str(self._root), **os.environ, **own}

    def directory(self, host: int) -> Path:
        """Returns the directory of a host's arena. With namespaces, only processes on that host can see the arena."""
        return self._shm / "ab"[host]

    def on_host(self, host: int, *arguments: str) -> list[str]:
        """Returns the command that runs a Python module on a host."""
        enter = [] if self.spaces is None else self.spaces[host].enter
        return [*enter, sys.executable, "-m", *arguments]

    def cut(self, is_up: bool = False) -> None:
        """Takes the link between the hosts down, or brings it up again if `is_up` is True. Requires namespaces."""
        assert self.spaces is not None
        _run(*self.spaces[0].enter, "ip", "link", "set", f"lla{os.getpid()}", "up" if is_up else "down")

    def power_off_b(self) -> None:
        """Ends host B as a loss of power would: kills all of its processes, and removes its arena. With namespaces, the
        host also falls silent.
        """
        if self.spaces is not None:
            self.cut()
            self.spaces[1].kill_all()
        for name in B_SERVICES:
            self.processes[name].send(signal.SIGKILL)
        enter = [] if self.spaces is None else self.spaces[1].enter
        _run(*enter, "rm", "-rf", str(self.directory(1)))

    def power_on_b(self) -> None:
        """Starts host B again, with an empty arena, and waits until its services are ready."""
        if self.spaces is not None:
            self.cut(is_up=True)
        _, decode = map(self.start, B_SERVICES)
        self.block_stores = (self.block_stores[0], self.wait_for_store("store-b"))
        decode.wait_ready()

    def limit_link(self, mbit_per_s: int) -> None:
        """Limits the rate of the link from A to B, in Mbit/s. 0: no limit."""
        assert self.spaces is not None
        device = f"lla{os.getpid()}"
        with contextlib.suppress(subprocess.CalledProcessError):
            _run(*self.spaces[0].enter, "tc", "qdisc", "del", "dev", device, "root")
        if mbit_per_s:
            limits = ("rate", f"{mbit_per_s}mbit", "burst", "256kb", "latency", "100ms")
            _run(*self.spaces[0].enter, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limits)

    def metric(self, name: str) -> float:
        """Returns the sum of the gateway's samples of a metric."""
        return sum(sample.value for sample in metrics_page.read(self.http) if sample.name == name)

    def metric_by(self, name: str, label: str) -> dict[str, float]:
        """Returns the values of a gateway metric by a label."""
        return {s.labels[label]: s.value for s in metrics_page.read(self.http) if s.name == name}

    def inspect(self, host: int) -> pb.InspectResponse:
        """Returns the counts and the holders of a block store, that of host A (0) or B (1)."""
        tls = {
            name: Path(str(path)) for name, path in self._further.get("store", {}).items() if name.startswith("tls_")
        }
        trust = TrustFiles(self._secret, **tls).read()
        with open_blocking_channel(self.block_stores[host], trust) as channel:
            stub: Any = block_store_pb2_grpc.BlockStoreServiceStub(channel)  # type: ignore[no-untyped-call]
            response: pb.InspectResponse = stub.Inspect(pb.InspectRequest(), timeout=60, metadata=trust.metadata)
            return response

    def _inspected(self, host: int) -> pb.InspectResponse | None:
        """Returns the result of `inspect`, or None if the block store answers UNAVAILABLE."""
        try:
            return self.inspect(host)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return None

    def assert_nothing_held(self, within_s: float = 60.0, hosts: Sequence[int] = (0, 1)) -> None:
        """Waits until every block of the hosts' arenas is FREE, CACHED or RESERVED. Raises AssertionError if this takes
        longer than `within_s` for a host.
        """
        for host in hosts:
            state = wait_for(
                lambda host=host: self._inspected(host),  # type: ignore[misc]
                lambda state: state is not None and state.sealed == 0 == state.quarantine,
                within_s,
                f"blocks of host {host} stay held",
            )
            assert state is not None and state.free + state.cached + state.reserved == state.num_blocks, state

    def log(self, name: str) -> str:
        return self.processes[name].log.read_text()

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            process.end()
        self.redis.close()
        if self.redis_of_b is not self.redis:
            self.redis_of_b.close()
        for space in self.spaces or ():
            space.close()
        subprocess.run(["rm", "-rf", str(self._shm)], check=False)
        self._scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
