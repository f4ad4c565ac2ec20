"""The Ray actor of a deployment: places the hosts and the front, and knows how many workers each host should have.

It does not watch the groups: Ray starts their actors again, and an actor that was started again asks for its plan
(`plan`). If this actor itself is started again, it asks the hosts.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from common.errors import StartupError, Unavailable
from looseleaf.cluster import ray_cluster
from looseleaf.cluster.actors import FrontActor, HostActor
from looseleaf.cluster.plan import HostPlan, Role, WorkerCpus, check_nodes, first_plan, scaled
from looseleaf.cluster.ray_cluster import Dead
from looseleaf.cluster.shared import Shared

_PLACE_S = 30.0
_STATUS_S = 2.0
_WAITING = "waiting for Ray"
"""The state of a group whose actor does not answer, because Ray is starting it."""
_STRATEGIES = {"preferred": "SPREAD", "strict": "STRICT_SPREAD"}


class Deployment:
    """The actor. Its methods run in threads."""

    def __init__(self, name: str, shared: Shared) -> None:
        self._name = name
        self._shared = shared
        self._settings = shared.settings()
        self._cpus = WorkerCpus.of(self._settings, shared.threads)
        self._changing = threading.Lock()
        self._hosts: dict[int, HostPlan] = {}
        self._leaving: set[str] = set()
        """Names of the actors of hosts that drain and end."""
        self._recover()

    def _recover(self) -> None:
        """Takes over the plans of the hosts that a predecessor has placed. A host that does not know its plan either,
        because both actors were lost, gets that of the start.
        """
        prefix = f"{self._name}.host-"
        names = [name for name in ray_cluster.actor_names() if name.startswith(prefix)]
        found = {name: actor for name in names if (actor := ray_cluster.find_actor(name)) is not None}
        plans = {host.index: host for host in first_plan(self._settings, self._cpus)}
        for name, plan in ray_cluster.call_all(found, "plan", _STATUS_S).items():
            index = int(name.removeprefix(prefix))
            if isinstance(plan, dict):
                self._hosts[index] = HostPlan(**plan)
            elif index in plans:
                self._hosts[index] = plans[index]
        self._release_empty()

    def start(self) -> None:
        """Places the hosts, each on a node of its own, and starts the services. Does not wait until they are ready.
        Raises StartupError if there are not enough nodes.
        """
        with self._changing:
            hosts = first_plan(self._settings, self._cpus)
            check_nodes(hosts, {node["address"]: node["cpus"] for node in ray_cluster.nodes()})
            strategy = _STRATEGIES[self._settings.spread]
            group = ray_cluster.place(self._group_name, [host.cpus for host in hosts], strategy, _PLACE_S)
            if group is None:
                raise StartupError(
                    f"hosts: the {len(hosts)} hosts, of {hosts[0].cpus} CPUs each, found no nodes of their own; "
                    "`ray status` shows what else uses the CPUs"
                )
            ray_cluster.create_on_head(FrontActor, f"{self._name}.front", self._shared)
            for host in hosts:
                self._hosts[host.index] = host
                self._create_host(host, group, host.index)

    def _create_host(self, host: HostPlan, group: Any, bundle: int) -> None:
        name = self._actor_name(host.index)
        ray_cluster.create_in_bundle(HostActor, name, group, bundle, self._name, host.index, self._shared)

    def _actor_name(self, index: int) -> str:
        return f"{self._name}.host-{index}"

    @property
    def _group_name(self) -> str:
        """The name of the placement group of the first hosts. A host that was added later has its own."""
        return f"{self._name}.hosts"

    def plan(self, index: int) -> dict[str, int]:
        """Returns the plan of one host."""
        return self._hosts[index].as_dict()

    def _actors(self) -> dict[str, Any]:
        names = ["front", *(f"host-{index}" for index in sorted(self._hosts)), *sorted(self._leaving)]
        found = {name: ray_cluster.find_actor(f"{self._name}.{name}") for name in names}
        return {name: actor for name, actor in found.items() if actor is not None}

    def status(self) -> dict[str, Any]:
        """Returns the nodes, the gateway's addresses, and the state and the plan of every group."""
        reports = ray_cluster.call_all(self._actors(), "status", _STATUS_S)
        groups = {name: _group(report) for name, report in reports.items()}
        for name in self._leaving & groups.keys():
            groups[name]["state"] = "draining"
        for index, host in list(self._hosts.items()):
            group = groups.setdefault(f"host-{index}", {"state": _WAITING})
            group["plan"] = host.as_dict()
            if not host.num_workers:
                group["state"] = "idle"
            elif group["state"] == _WAITING and not self._is_placed(index):
                group["state"] = f"waiting for a node with {host.cpus} free CPUs"
        return {"name": self._name, "nodes": ray_cluster.nodes(), "groups": groups}

    def _is_placed(self, index: int) -> bool:
        """Returns whether the host's bundle is on a live node."""
        if (own := ray_cluster.find_group(self._actor_name(index))) is not None:
            return ray_cluster.is_placed(own, 0)
        group = ray_cluster.find_group(self._group_name)
        return group is not None and ray_cluster.is_placed(group, index)

    def logs(self, group: str, most_lines: int) -> list[str]:
        """Returns the last log lines of a group. Raises StartupError if there is no such group."""
        actors = self._actors()
        if group not in actors:
            raise StartupError(f"--logs {group}: the groups are {', '.join(actors)}")
        lines: list[str] = ray_cluster.call(actors[group], "logs", most_lines)
        return lines

    def sample(self) -> str:
        """Returns a line of generated text."""
        line: str = ray_cluster.call(self._actors()["front"], "sample")
        return line

    def scale(self, wanted: dict[Role, int]) -> None:
        """Changes the numbers of workers. Returns when the hosts know their plans; new workers then start, and surplus
        ones drain. Raises StartupError if a new worker finds no room.
        """
        with self._changing:
            after = scaled(list(self._hosts.values()), wanted, self._cpus)
            added = self._place_new([host for host in after if host.index not in self._hosts])
            self._hosts = {host.index: host for host in after}
            actors = self._actors()
            for host in after:
                if host.index in added:
                    self._create_host(host, added[host.index], 0)
                else:
                    with suppress(Unavailable):  # it asks for its plan when Ray has started it again
                        ray_cluster.call(actors[f"host-{host.index}"], "resize", host.as_dict())
            self._release_empty()

    def _release_empty(self) -> None:
        """Ends the hosts that have no workers left and a placement group of their own, and frees their CPUs. Does not
        wait until they have ended.
        """
        for host in [host for host in self._hosts.values() if not host.num_workers]:
            if (group := ray_cluster.find_group(self._actor_name(host.index))) is not None:
                del self._hosts[host.index]
                self._leaving.add(name := f"host-{host.index}")
                threading.Thread(target=self._release, args=(name, group), daemon=True).start()

    def _release(self, name: str, group: Any) -> None:
        if (actor := ray_cluster.find_actor(f"{self._name}.{name}")) is not None:
            ray_cluster.call_all({name: actor}, "stop", self._most_s)
            ray_cluster.kill(actor)
        ray_cluster.remove_group(group)
        self._leaving.discard(name)

    @property
    def _most_s(self) -> float:
        """Time in seconds that a group has to drain and to end."""
        return self._settings.drain_delay + self._settings.grace_s + 30

    def _place_new(self, hosts: list[HostPlan]) -> dict[int, Any]:
        """Reserves CPUs for new hosts. Returns their placement groups by the hosts' indices."""
        added: dict[int, Any] = {}
        for host in hosts:
            group = ray_cluster.place(self._actor_name(host.index), [host.cpus], "PACK", _STATUS_S)
            if group is None:
                for other in added.values():
                    ray_cluster.remove_group(other)
                raise StartupError(
                    f"no node has {host.cpus} free CPUs for another worker; `ray status` shows who uses them"
                )
            added[host.index] = group
        return added

    def stop(self) -> None:
        """Drains and ends the gateway, then the hosts, and frees the CPUs."""
        with self._changing:
            actors = self._actors()
            front = {name: actors.pop(name) for name in ("front",) if name in actors}
            for part in (front, actors):
                ray_cluster.call_all(part, "stop", self._most_s)
                for actor in part.values():
                    ray_cluster.kill(actor)
            for name in (self._group_name, *(f"{self._name}.{name}" for name in actors)):
                if (group := ray_cluster.find_group(name)) is not None:
                    ray_cluster.remove_group(group)
            self._hosts.clear()


def _group(report: dict[str, Any] | Dead | None) -> dict[str, Any]:
    """Returns the status of a group. `report` is the answer of its actor."""
    if isinstance(report, Dead):
        return {"state": "dead", "failure": report.reason}
    return report or {"state": _WAITING}
