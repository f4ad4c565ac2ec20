"""Which host gets which workers. No Ray here."""

from __future__ import annotations

import pytest

from common.errors import StartupError
from looseleaf.cluster.plan import (
    HostPlan,
    WorkerCpus,
    check_nodes,
    first_plan,
    parse_scale,
    scaled,
    threads_per_worker,
)
from looseleaf.cluster.settings import ClusterSettings

ONE = WorkerCpus(1, 1)


def counts(plan: tuple[HostPlan, ...]) -> list[tuple[int, int]]:
    return [(host.prefill, host.decode) for host in plan]


@pytest.mark.parametrize(
    "hosts,prefill,decode,expected",
    [
        (1, 1, 1, [(1, 1)]),
        (2, 2, 2, [(1, 1), (1, 1)]),
        (2, 1, 1, [(1, 0), (0, 1)]),
        (2, 1, 3, [(1, 1), (0, 2)]),
        (3, 2, 2, [(1, 1), (1, 0), (0, 1)]),
    ],
)
def test_workers_are_dealt_evenly(hosts: int, prefill: int, decode: int, expected: list[tuple[int, int]]) -> None:
    settings = ClusterSettings(hosts=hosts, prefill=prefill, decode=decode)
    plan = first_plan(settings, ONE)
    assert counts(plan) == expected
    assert {host.cpus for host in plan} == {max(map(sum, expected))}


def test_all_ranks_of_a_worker_count_towards_one_host() -> None:
    settings = ClusterSettings(hosts=2, prefill=2, decode=2, tensor_parallel_size=2, decode_pipeline_parallel_size=2)
    assert WorkerCpus.of(settings, threads=1) == WorkerCpus(2, 4)
    assert WorkerCpus.of(settings, threads=3) == WorkerCpus(3, 4)
    plan = first_plan(settings, WorkerCpus(2, 4))
    assert counts(plan) == [(1, 1), (1, 1)] and plan[0].cpus == 6


def test_a_host_can_reserve_more_cpus_than_it_needs_but_not_fewer() -> None:
    assert first_plan(ClusterSettings(cpus_per_host=9), ONE)[0].cpus == 9
    with pytest.raises(StartupError, match="cpus_per_host: 1 is less than the 2 CPUs of a host's workers"):
        first_plan(ClusterSettings(cpus_per_host=1), ONE)


@pytest.mark.parametrize(
    "given,node_cpus,threads",
    [
        ({"threads": 5}, [2], 5),
        ({"hosts": 2, "prefill": 2, "decode": 2}, [64, 16, 32], 16),
        ({"hosts": 2, "prefill": 2, "decode": 2, "cpus_per_host": 8}, [64, 64], 4),
        ({"hosts": 3, "prefill": 2, "decode": 2}, [8], 4),  # refused later, by `check_nodes`
        ({}, [1], 1),
    ],
)
def test_threads_share_the_smallest_node(given: dict[str, int], node_cpus: list[int], threads: int) -> None:
    assert threads_per_worker(ClusterSettings(**given), node_cpus) == threads  # type: ignore[arg-type]


def test_hosts_need_a_node_each() -> None:
    hosts = [HostPlan(0, 4), HostPlan(1, 4)]
    check_nodes(hosts, {"a": 4, "b": 9})
    with pytest.raises(StartupError, match=r"hosts: 2 is more than the nodes with 4 CPUs or more .*a: 8, b: 3"):
        check_nodes(hosts, {"a": 8, "b": 3})


def test_new_workers_take_room_on_a_host_before_they_get_a_host() -> None:
    plan = (HostPlan(0, 3, 1, 1), HostPlan(1, 2, 1, 1))
    assert scaled(plan, {"decode": 3}, ONE) == (HostPlan(0, 3, 1, 2), HostPlan(1, 2, 1, 1))
    four = scaled(plan, {"decode": 4}, ONE)
    assert four == (HostPlan(0, 3, 1, 2), HostPlan(1, 2, 1, 1), HostPlan(2, 1, 0, 1))
    assert scaled(four, {"decode": 2}, ONE) == (HostPlan(0, 3, 1, 1), HostPlan(1, 2, 1, 1), HostPlan(2, 1, 0, 0))


def test_both_roles_can_change_places() -> None:
    plan = (HostPlan(0, 2, 0, 2),)
    assert scaled(plan, {"prefill": 1, "decode": 1}, ONE) == (HostPlan(0, 2, 1, 1),)
    assert scaled(plan, {}, ONE) == plan


def test_a_worker_moves_only_if_it_is_removed() -> None:
    plan = (HostPlan(0, 8, 4, 4), HostPlan(3, 8, 1, 1))
    assert counts(scaled(plan, {"prefill": 3}, ONE)) == [(2, 4), (1, 1)]


def test_scale_reads_roles_and_numbers() -> None:
    assert parse_scale(["decode=3", "prefill=64"]) == {"decode": 3, "prefill": 64}
    for words, reason in [
        (["decode"], "'decode' must be prefill=N or decode=N, with N from 1 to 64"),
        (["decode=0"], "with N from 1 to 64"),
        (["decode=65"], "with N from 1 to 64"),
        (["store=1"], "must be prefill=N or decode=N"),
        (["decode=1", "decode=2"], "decode is given twice"),
        ([], "give prefill=N, decode=N or both"),
    ]:
        with pytest.raises(StartupError, match=reason):
            parse_scale(words)
