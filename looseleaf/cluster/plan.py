"""Distributes the workers of a deployment over its hosts. Pure functions; this module does not know Ray.

A host is a block store with its workers, and reserves a number of CPUs on one node. A worker with several threads or
ranks needs as many CPUs. All ranks of a worker are on its host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from common.errors import StartupError
from looseleaf.cluster.settings import ClusterSettings
from looseleaf.serve.placement import grids_by_package

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The workers of one host."""

    index: int
    cpus: int
    """The number of CPUs that the host reserves."""
    prefill: int = 0
    decode: int = 0

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode

    def count(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode

    def with_more(self, role: Role, more: int) -> HostPlan:
        return replace(self, **{role: self.count(role) + more})  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class WorkerCpus:
    """The number of CPUs that a worker of each role needs."""

    prefill: int
    decode: int

    @classmethod
    def of(cls, settings: ClusterSettings, threads: int) -> Self:
        """Returns the larger of the number of threads and the number of ranks of each kind of worker."""
        ranks = {
            package: grid.tensor_parallel_size * grid.pipeline_parallel_size
            for package, grid in grids_by_package(settings).items()
        }
        return cls(max(threads, ranks["prefill_svc"]), max(threads, ranks["decode_svc"]))

    def of_role(self, role: Role) -> int:
        return self.prefill if role == "prefill" else self.decode

    def used(self, host: HostPlan) -> int:
        return host.prefill * self.prefill + host.decode * self.decode


def first_plan(settings: ClusterSettings, cpus: WorkerCpus) -> tuple[HostPlan, ...]:
    """Deals the workers to the hosts: prefill workers first, each to the host that uses the fewest CPUs. Raises
    StartupError if `cpus_per_host` is too small.
    """
    hosts = [HostPlan(index, 0) for index in range(settings.hosts)]
    for role in ROLES:
        for _ in range(getattr(settings, role)):
            least = min(hosts, key=lambda host: (cpus.used(host), host.index))
            hosts[least.index] = least.with_more(role, 1)
    needed = max(cpus.used(host) for host in hosts)
    if settings.cpus_per_host is not None and settings.cpus_per_host < needed:
        raise StartupError(
            f"cpus_per_host: {settings.cpus_per_host} is less than the {needed} CPUs of a host's workers"
        )
    return tuple(replace(host, cpus=settings.cpus_per_host or needed) for host in hosts)


def threads_per_worker(settings: ClusterSettings, node_cpus: Sequence[int]) -> int:
    """Returns the number of threads of a worker: `threads`, or else an even share of `cpus_per_host`, or else of the
    CPUs of the smallest node that the hosts need. `node_cpus` are the CPUs of each node.
    """
    if settings.threads:
        return settings.threads
    per_host = -(-(settings.prefill + settings.decode) // settings.hosts)
    smallest = sorted(node_cpus, reverse=True)[: settings.hosts][-1:]
    share = settings.cpus_per_host or sum(smallest)
    return max(1, share // per_host)


def check_nodes(hosts: Sequence[HostPlan], node_cpus: Mapping[str, int]) -> None:
    """Checks that there are enough nodes for each host to have one of its own. `node_cpus` are the CPUs of each node,
    by address. Raises StartupError otherwise.
    """
    most = max(host.cpus for host in hosts)
    if sum(cpus >= most for cpus in node_cpus.values()) < len(hosts):
        there = ", ".join(f"{node}: {cpus}" for node, cpus in sorted(node_cpus.items())) or "none"
        raise StartupError(
            f"hosts: {len(hosts)} is more than the nodes with {most} CPUs or more (the nodes and their CPUs: {there})"
        )


def scaled(hosts: Sequence[HostPlan], wanted: Mapping[Role, int], cpus: WorkerCpus) -> tuple[HostPlan, ...]:
    """Returns the plan with other numbers of workers. No worker moves: workers are removed from the hosts that have the
    most of their role, and added to the least used hosts with room. If no host has room, new hosts are added.
    """
    plan = {host.index: host for host in hosts}
    for role, number in wanted.items():
        while sum(host.count(role) for host in plan.values()) > number:
            most = max(plan.values(), key=lambda host: (host.count(role), host.index))
            plan[most.index] = most.with_more(role, -1)
    for role, number in wanted.items():
        while sum(host.count(role) for host in plan.values()) < number:
            needed = cpus.of_role(role)
            roomy = [host for host in plan.values() if host.cpus - cpus.used(host) >= needed]
            new = HostPlan(max(plan) + 1, needed)
            least = min(roomy, key=lambda host: (cpus.used(host), host.index), default=new)
            plan[least.index] = least.with_more(role, 1)
    return tuple(plan[index] for index in sorted(plan))


def parse_scale(words: Sequence[str]) -> dict[Role, int]:
    """Converts ["decode=3"] to {"decode": 3}. Raises StartupError for other words."""
    wanted: dict[Role, int] = {}
    for word in words:
        name, equals, number = word.partition("=")
        role: Any = name
        if role not in ROLES or not equals or not number.isdecimal() or not 1 <= int(number) <= 64:
            raise StartupError(f"{word!r} must be prefill=N or decode=N, with N from 1 to 64")
        if role in wanted:
            raise StartupError(f"{name} is given twice")
        wanted[role] = int(number)
    if not wanted:
        raise StartupError("give prefill=N, decode=N or both")
    return wanted
