"""`looseleaf status`, `looseleaf scale` and `looseleaf down`: show, change and end a deployment on a Ray cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from common.settings import Settings, settings_config
from looseleaf.cluster import client, ray_cluster
from looseleaf.cluster.plan import parse_scale
from looseleaf.commands.up import connected


class DeploymentSettings(Settings):
    """Flags that name a deployment."""

    name: str = Field("looseleaf", description="name of the deployment")
    ray_address: str = Field("auto", description="address of the Ray cluster; auto: RAY_ADDRESS, or the local node's")


class StatusSettings(DeploymentSettings):
    """Flags of `looseleaf status`, which shows the nodes, the hosts and the workers of a deployment on Ray."""

    model_config = settings_config("LOOSELEAF_STATUS_", "looseleaf status")

    json_: bool = Field(False, alias="json", description="print the status as JSON")
    logs: str | None = Field(None, description="print the log of a group instead: front, host-0, host-1 and so on")
    lines: int = Field(200, ge=1, le=1000, description="maximum number of lines of that log")


class ScaleSettings(DeploymentSettings):
    """Flags of `looseleaf scale`, which changes the numbers of workers while requests run: `looseleaf scale decode=3`.
    Workers that are removed drain first.
    """

    model_config = settings_config("LOOSELEAF_SCALE_", "looseleaf scale")

    workers: CliPositionalArg[list[str]] = Field(description="prefill=N, decode=N or both, for the whole deployment")


class DownSettings(DeploymentSettings):
    """Flags of `looseleaf down`, which drains and ends a deployment on Ray."""

    model_config = settings_config("LOOSELEAF_DOWN_", "looseleaf down")


def status(argv: Sequence[str]) -> int:
    settings = StatusSettings.load(argv)
    with connected(settings.ray_address) as out:
        if settings.logs is not None:
            print("\n".join(client.logs(settings.name, settings.logs, settings.lines)), file=out)
            return 0
        found = client.status(settings.name)
    print(json.dumps(found, indent=2) if settings.json_ else table(found, time.time()))
    return 0


def scale(argv: Sequence[str]) -> int:
    settings = ScaleSettings.load(argv)
    wanted = parse_scale(settings.workers)
    with connected(settings.ray_address):
        client.scale(settings.name, wanted)
        found = client.status(settings.name)
    print(table(found, time.time()))
    return 0


def down(argv: Sequence[str]) -> int:
    settings = DownSettings.load(argv)
    with connected(settings.ray_address):
        client.stop(ray_cluster.deployment(settings.name))
    return 0


def table(found: dict[str, Any], now: float) -> str:
    """Returns a deployment's status as text."""
    lines = [f"deployment {found['name']}"]
    for node in found["nodes"]:
        lines.append(f"  node {node['address']}{' (head)' * node['is_head']}, {node['cpus']} CPUs")
    for name, group in found["groups"].items():
        where = f" on {group['node']} for {now - group['since']:.0f} s" if "node" in group else ""
        lines.append(f"  {name}: {group['state']}{where}")
        if group.get("addresses"):
            lines.append("    HTTP {}, gRPC {}".format(*group["addresses"]))
        pids = group.get("pids", {})
        lines += [
            f"    {service}: {state}{_pid(pids.get(service))}" for service, state in group.get("services", {}).items()
        ]
        if group.get("failure"):
            lines.append(f"    last failure: {group['failure']}")
    return "\n".join(lines)


def _pid(pid: int | None) -> str:
    return "" if pid is None else f" (pid {pid})"
