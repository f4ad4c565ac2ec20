"""Starts, shows, scales and ends deployments, from any process on a node of the Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from common.errors import StartupError
from looseleaf.cluster import ray_cluster
from looseleaf.cluster.deployment import Deployment
from looseleaf.cluster.plan import Role, threads_per_worker
from looseleaf.cluster.settings import ClusterSettings
from looseleaf.cluster.shared import new_shared

_POLL_S = 0.25
_START_S = 180.0


def create(settings: ClusterSettings) -> Any:
    """Creates the actor of a deployment and places its groups. Returns the actor. Raises StartupError if there is a
    deployment of this name, or if there are not enough nodes.
    """
    if ray_cluster.find_actor(settings.name) is not None:
        raise StartupError(f"name: the deployment {settings.name!r} is already there; `looseleaf down` ends it")
    nodes = ray_cluster.nodes()
    head = next((node["address"] for node in nodes if node["is_head"]), None)
    if head is None:
        raise StartupError("the Ray cluster has no live head node")
    shared = new_shared(settings, threads_per_worker(settings, [node["cpus"] for node in nodes]), head)
    actor = ray_cluster.create_on_head(Deployment, settings.name, settings.name, shared)
    try:
        ray_cluster.call(actor, "start", timeout_s=_START_S)
    except BaseException:
        stop(actor)
        raise
    return actor


def wait_ready(actor: Any, seconds: float, tell: Callable[[str], object]) -> dict[str, Any]:
    """Returns the status of a deployment when all its groups are ready. Calls `tell` with lines about the progress.
    Raises StartupError if a group fails, or is not ready after `seconds`.
    """
    deadline = time.monotonic() + seconds
    shown: dict[str, str] = {}
    while True:
        status: dict[str, Any] = ray_cluster.call(actor, "status")
        groups: Mapping[str, Mapping[str, Any]] = status["groups"]
        for name, group in groups.items():
            line = f"{name}: {group['state']}" + (f" on {group['node']}" if "node" in group else "")
            if shown.get(name) != line:
                shown[name] = line
                tell(line)
            if group.get("failure"):
                raise StartupError(f"{name}: {group['failure']}")
        if all(group["state"] == "ready" for group in groups.values()):
            return status
        if time.monotonic() > deadline:
            late = ", ".join(name for name, group in groups.items() if group["state"] != "ready")
            raise StartupError(f"not ready after {seconds:.0f} s: {late}")
        time.sleep(_POLL_S)


def status(name: str) -> dict[str, Any]:
    """Returns what `Deployment.status` returns."""
    found: dict[str, Any] = ray_cluster.call(ray_cluster.deployment(name), "status")
    return found


def logs(name: str, group: str, most_lines: int) -> list[str]:
    """Returns the last log lines of one group of a deployment."""
    lines: list[str] = ray_cluster.call(ray_cluster.deployment(name), "logs", group, most_lines)
    return lines


def scale(name: str, wanted: Mapping[Role, int]) -> None:
    """Changes the numbers of workers of a deployment. Does not wait for workers to start or to drain."""
    ray_cluster.call(ray_cluster.deployment(name), "scale", dict(wanted), timeout_s=_START_S)


def sample(actor: Any) -> str:
    """Returns a line of text that the deployment of an actor generates."""
    line: str = ray_cluster.call(actor, "sample")
    return line


def stop(actor: Any) -> None:
    """Drains and ends the deployment of an actor."""
    try:
        ray_cluster.call(actor, "stop", timeout_s=None)
    finally:
        ray_cluster.kill(actor)
