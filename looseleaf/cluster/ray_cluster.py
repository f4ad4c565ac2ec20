"""The calls of Ray. Other modules of this package call Ray only through this one, which imports it on first use."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import LooseleafError, StartupError, Unavailable

NAMESPACE = "looseleaf"
HEAD = "node:__internal_head__"
"""The resource that only Ray's head node has."""
CALL_S = 60.0
_THREADS = 16


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise StartupError("this command needs Ray: pip install 'looseleaf[ray]'") from None
    return ray


def connect(address: str) -> None:
    """Connects this process to a running Ray cluster. Raises StartupError if there is none at `address`."""
    ray = _ray()
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR,
            configure_logging=False,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartupError(
            f"no Ray cluster at {address!r}: {error}; start one with `ray start --head`, or give its address with "
            "--ray-address"
        ) from None


def disconnect() -> None:
    _ray().shutdown()


def node_address() -> str:
    """Returns the address of the node of this actor."""
    return str(_ray().util.get_node_ip_address())


def nodes() -> list[dict[str, Any]]:
    """Returns the address and the number of CPUs of every live node, and whether it is the head node."""
    return [
        {
            "address": node["NodeManagerAddress"],
            "is_head": HEAD in node["Resources"],
            "cpus": int(node["Resources"].get("CPU", 0)),
        }
        for node in _ray().nodes()
        if node["Alive"]
    ]


def deployment(name: str) -> Any:
    """Returns the actor of a deployment. Raises StartupError if there is none."""
    actor = find_actor(name)
    if actor is None:
        names = sorted(n for n in _ray().util.list_named_actors() if "." not in n)
        there = f"the deployments are {', '.join(names)}" if names else "there are none"
        raise StartupError(f"no deployment {name!r} in this Ray cluster; {there}")
    return actor


def find_actor(name: str) -> Any | None:
    try:
        return _ray().get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def actor_names() -> list[str]:
    """Returns the names of all actors of all deployments."""
    return list(_ray().util.list_named_actors())


def create_on_head(kind: type, name: str, *arguments: object) -> Any:
    """Creates a named actor on the head node. Ray starts it again if it dies."""
    return _create(kind, name, arguments, num_cpus=0, resources={HEAD: 0.001})


def create_in_bundle(kind: type, name: str, group: Any, bundle: int, *arguments: object) -> Any:
    """Creates a named actor in a bundle of a placement group. Ray starts it again if it dies, on another node if the
    bundle's node is lost.
    """
    _ray()
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, bundle)
    cpus = group.bundle_specs[bundle]["CPU"]
    return _create(kind, name, arguments, num_cpus=cpus, scheduling_strategy=strategy)


def _create(kind: type, name: str, arguments: Sequence[object], **options: Any) -> Any:
    remote = _ray().remote(kind)
    return remote.options(
        name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=-1, max_concurrency=_THREADS, **options
    ).remote(*arguments)


def kill(actor: Any) -> None:
    """Ends an actor for good."""
    _ray().kill(actor, no_restart=True)


def call(actor: Any, method: str, *arguments: object, timeout_s: float | None = CALL_S) -> Any:
    """Returns the result of an actor's method. Raises the StartupError or LooseleafError of the method, and Unavailable
    if the actor is not running or does not answer in time. None means no time limit.
    """
    ray = _ray()
    try:
        return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, StartupError | LooseleafError):
            raise error.cause from None
        raise
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        raise Unavailable(f"the Ray actor does not answer {method!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Dead:
    """The result of a call to an actor that Ray will not start again, for example because its class cannot be imported
    on its node.
    """

    reason: str


def call_all(actors: Mapping[str, Any], method: str, timeout_s: float) -> dict[str, Any]:
    """Returns the results of a method by name: `Dead` for the actors that are dead, and None for those that are not
    running now or do not answer in time.
    """
    ray = _ray()
    calls = {name: getattr(actor, method).remote() for name, actor in actors.items()}
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
    results: dict[str, Any] = {}
    for name, pending in calls.items():
        try:
            results[name] = ray.get(pending, timeout=0)
        except ray.exceptions.ActorDiedError as error:
            results[name] = Dead(str(error))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            results[name] = None
    return results


def place(name: str, cpus: Sequence[int], strategy: str, timeout_s: float) -> Any:
    """Reserves bundles of CPUs on nodes, and returns the placement group. Returns None if they found no room within
    `timeout_s`, or if the strategy spreads them but not each of them is on a node of its own.
    """
    _ray()
    from ray.util.placement_group import placement_group

    bundles = [{"CPU": number} for number in cpus]
    group = placement_group(bundles, strategy=strategy, name=name, lifetime="detached")
    if group.wait(timeout_s) and len(set(_bundle_nodes(group).values())) == len(cpus):
        return group
    remove_group(group)
    return None


def is_placed(group: Any, bundle: int) -> bool:
    """Returns whether a bundle is on a live node. If not, it waits for one with room."""
    alive = {node["NodeID"] for node in _ray().nodes() if node["Alive"]}
    return _bundle_nodes(group).get(bundle) in alive


def _bundle_nodes(group: Any) -> dict[int, str]:
    _ray()
    from ray.util.placement_group import placement_group_table

    return dict(placement_group_table(group)["bundles_to_node_id"])


def find_group(name: str) -> Any | None:
    _ray()
    from ray.util.placement_group import get_placement_group

    try:
        return get_placement_group(name)
    except ValueError:
        return None


def remove_group(group: Any) -> None:
    _ray()
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)
