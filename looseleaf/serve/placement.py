"""Decides which processes a launch has and how they share this machine's cores: roles, threads, and how threads wait.

Starts nothing and does not build flags. The measurements are in docs/log.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from common.cores import usable_cores
from common.errors import StartupError
from looseleaf.serve.device import resolve_device
from looseleaf.serve.model_source import REPOSITORY
from looseleaf.serve.settings import ServeSettings

SPLIT_FROM_CORES = 8
"""With `--roles auto` on a CPU with at least this many cores, prefill and decode run in separate processes, which share
the cores evenly. On two cores, a single process in which the roles take turns had a higher throughput under every load
that was measured. Larger machines have not been measured.
"""
_BOTH = ("both", "adaptive")
"""The values of `--roles` with which each worker process has both roles."""
_TORCHLESS = ("block_store", "gateway")


def settled(settings: ServeSettings) -> ServeSettings:
    """Returns `settings` with `device` and `roles` resolved. Raises StartupError if the device is unavailable, if each
    process hosts both roles but their numbers of workers or their parallel sizes differ, or if a spare worker is
    requested although a worker has several ranks.
    """
    device = resolve_device(settings.device)
    grids = grids_by_package(settings)
    paired = settings.prefill == settings.decode and grids["prefill_svc"] == grids["decode_svc"]
    roles = settings.roles
    if roles == "auto":
        alone = paired and settings.prefill == 1
        together = paired if device == "cuda" else alone and is_small()
        roles = "both" if together else "split"
    if roles in _BOTH and not paired:
        raise StartupError(
            f"--prefill {settings.prefill} and --decode {settings.decode} must be equal if each process hosts both "
            "roles, and so must their parallel sizes; --roles split runs them in separate processes"
        )
    if settings.spare and (most := most_ranks(settings)) > 1:
        raise StartupError(f"--spare {settings.spare} does not support workers with {most} ranks")
    return settings.model_copy(update={"device": device, "roles": roles})


def hosts_both(settings: ServeSettings) -> bool:
    """Returns whether each worker process of settled `settings` has both roles."""
    return settings.roles in _BOTH


def is_small() -> bool:
    """Returns whether this process may use fewer than SPLIT_FROM_CORES cores."""
    return usable_cores() < SPLIT_FROM_CORES


def describe(asked: ServeSettings, settings: ServeSettings) -> str:
    """Returns a line for the log that states how the roles share the machine, and why. `settings` is the settled form
    of `asked`.
    """
    cores, threads = usable_cores(), threads_per_worker(settings)
    if hosts_both(settings):
        how, other = "prefill and decode in one process", "split runs them in separate processes"
    else:
        how, other = "prefill and decode in separate processes", "both runs them in one process"
    if settings.device == "cpu":
        turns = ", taking turns" if hosts_both(settings) or by_turns(settings) else ""
        how += f"{turns}, {threads} thread{'s' * (threads != 1)} each"
    if asked.roles != "auto":
        why = f"--roles {asked.roles}"
    elif settings.device == "cuda":
        why = "as many prefill as decode workers on a GPU" if settings.roles == "both" else "their counts differ"
    elif settings.prefill + settings.decode > 2:
        why = "more than one worker of a role"
    else:
        why = f"{'fewer than' if is_small() else 'at least'} {SPLIT_FROM_CORES} cores"
    return f"looseleaf: {cores} cores: {how} ({why}; --roles {other})"


def worker_processes(settings: ServeSettings) -> list[tuple[str, str]]:
    """Returns the name and the package of every worker process of settled `settings`."""
    if hosts_both(settings):
        return [(name, "looseleaf.both_roles") for name in numbered("worker", settings.prefill)]
    counts = {"prefill": settings.prefill, "decode": settings.decode}
    return [(name, f"{role}_svc") for role, count in counts.items() for name in numbered(role, count)]


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes of the grid of a worker's ranks (docs/parallel.md)."""

    tensor_parallel_size: int
    pipeline_parallel_size: int


def grids_by_package(settings: ServeSettings) -> dict[str, Grid]:
    """Returns the grid of each kind of worker, by package."""
    shares, stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    prefill = Grid(settings.prefill_tensor_parallel_size or shares, settings.prefill_pipeline_parallel_size or stages)
    decode = Grid(settings.decode_tensor_parallel_size or shares, settings.decode_pipeline_parallel_size or stages)
    return {"prefill_svc": prefill, "decode_svc": decode, "looseleaf.both_roles": prefill}


def most_ranks(settings: ServeSettings) -> int:
    """Returns the number of ranks of the largest worker."""
    grids = grids_by_package(settings).values()
    return max(grid.tensor_parallel_size * grid.pipeline_parallel_size for grid in grids)


def numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}-{number}" for number in range(count)]


def threads_per_worker(settings: ServeSettings, base: Mapping[str, str] = os.environ) -> int:
    """Returns `--threads`, or else the user's OMP_NUM_THREADS, or else an even share of the cores that this process may
    use. On a CPU with few cores, if the roles have separate processes, the workers of each role share all cores.
    """
    if settings.threads:
        return settings.threads
    asked = base.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # after a comma: nested teams
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    sharing = max(settings.prefill, settings.decode) if _apart_on_few(settings) else len(worker_processes(settings))
    return max(1, usable_cores() // sharing)


def by_turns(settings: ServeSettings) -> bool:
    """Returns whether prefill and decode, in separate processes, take turns, each with all cores."""
    return _apart_on_few(settings) and threads_per_worker(settings) >= usable_cores()


def _apart_on_few(settings: ServeSettings) -> bool:
    return settings.roles == "split" and settings.device == "cpu" and is_small()


def child_environment(base: Mapping[str, str], name: str, threads: int) -> dict[str, str]:
    """Returns the environment of the service `name`.

    A service with a model computes in `threads` threads, other services in one. By default, idle OpenMP threads sleep,
    because with few cores, spinning threads slow down other threads; numpy's OpenBLAS uses one thread; and the memory
    of workers uses huge pages if the system offers them on request (glibc 2.35 and later). The user's values of the
    variables for these three defaults are kept.
    """
    environment = dict(base)
    environment["OMP_NUM_THREADS"] = "1" if name in _TORCHLESS else str(threads)
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if name not in _TORCHLESS:
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    environment["PYTHONUNBUFFERED"] = "1"
    if (REPOSITORY / "pyproject.toml").is_file():  # a checkout, which need not be installed
        paths = [str(REPOSITORY), *filter(None, [base.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
