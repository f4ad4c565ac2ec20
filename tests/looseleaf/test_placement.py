"""The processes of a launch and their numbers of threads, for given cores, device and flags."""

from __future__ import annotations

import os

import pytest

from common.errors import StartupError
from looseleaf.serve import device
from looseleaf.serve.placement import (
    by_turns,
    child_environment,
    describe,
    settled,
    threads_per_worker,
    worker_processes,
)
from looseleaf.serve.settings import ServeSettings


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which torch can use a GPU."""
    monkeypatch.setattr(device, "why_no_gpu", lambda: None)


def on_cores(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Simulates a machine with this number of cores and without a GPU."""
    monkeypatch.setattr(device, "why_no_gpu", lambda: "the CUDA driver sees no GPU")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(number)))


@pytest.mark.parametrize(
    "cores,given,processes,threads",
    [
        (1, {}, ["worker"], 1),
        (2, {}, ["worker"], 2),
        (7, {}, ["worker"], 7),
        (8, {}, ["prefill", "decode"], 4),
        (64, {}, ["prefill", "decode"], 32),
        (1, {"roles": "split"}, ["prefill", "decode"], 1),
        (2, {"roles": "split"}, ["prefill", "decode"], 2),
        (64, {"roles": "both"}, ["worker"], 64),
        (2, {"prefill": 2}, ["prefill-0", "prefill-1", "decode"], 1),
        (4, {"prefill": 2, "decode": 2}, ["prefill-0", "prefill-1", "decode-0", "decode-1"], 2),
        (4, {"roles": "both", "prefill": 2, "decode": 2}, ["worker-0", "worker-1"], 2),
        (4, {"roles": "adaptive", "prefill": 2, "decode": 2}, ["worker-0", "worker-1"], 2),
        (8, {"threads": 3}, ["prefill", "decode"], 3),
    ],
)
def test_processes_and_threads_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: dict[str, object], processes: list[str], threads: int
) -> None:
    on_cores(monkeypatch, cores)
    asked = ServeSettings(**given)  # type: ignore[arg-type]
    found = settled(asked)
    assert [name for name, _ in worker_processes(found)] == processes
    assert threads_per_worker(found, {}) == threads


def test_one_process_hosts_both_roles_on_a_gpu_unless_the_counts_differ(gpu: None) -> None:
    assert worker_processes(settled(ServeSettings())) == [("worker", "looseleaf.both_roles")]
    assert len(worker_processes(settled(ServeSettings(roles="split")))) == 2
    assert len(worker_processes(settled(ServeSettings(prefill=1, decode=2)))) == 3


def test_unequal_counts_cannot_be_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cores(monkeypatch, 2)
    with pytest.raises(StartupError, match="--prefill 1 and --decode 2 must be equal"):
        settled(ServeSettings(roles="both", decode=2))
    with pytest.raises(StartupError, match="--prefill 1 and --decode 2 must be equal"):
        settled(ServeSettings(roles="adaptive", decode=2))


@pytest.mark.parametrize(
    "cores,given,said",
    [
        (
            2,
            {},
            "2 cores: prefill and decode in one process, taking turns, 2 threads each (fewer than 8 cores; ",
        ),
        (8, {}, "8 cores: prefill and decode in separate processes, 4 threads each (at least 8 cores; --roles both"),
        (
            2,
            {"roles": "split"},
            "2 cores: prefill and decode in separate processes, taking turns, 2 threads each (--roles split; ",
        ),
        (2, {"decode": 2}, "separate processes, 1 thread each (more than one worker of a role; "),
    ],
)
def test_the_log_says_how_and_why(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: dict[str, object], said: str
) -> None:
    on_cores(monkeypatch, cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    asked = ServeSettings(**given)  # type: ignore[arg-type]
    assert said in describe(asked, settled(asked))


def test_a_users_own_threads_win(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cores(monkeypatch, 4)
    settings = settled(ServeSettings())
    assert threads_per_worker(settings, {"OMP_NUM_THREADS": "3"}) == 3
    assert threads_per_worker(settings, {"OMP_NUM_THREADS": "3,2"}) == 3
    assert threads_per_worker(settings, {"OMP_NUM_THREADS": "many"}) == 4
    assert threads_per_worker(settled(ServeSettings(threads=1)), {"OMP_NUM_THREADS": "3"}) == 1


@pytest.mark.parametrize(
    "cores,given,expected",
    [
        (1, {"roles": "split"}, True),
        (2, {"roles": "split"}, True),
        (2, {"roles": "split", "threads": 1}, False),
        (2, {"prefill": 1, "decode": 2}, False),
        (2, {}, False),
        (8, {"roles": "split"}, False),
    ],
)
def test_prefill_and_decode_take_turns_where_each_has_all_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: dict[str, object], expected: bool
) -> None:
    on_cores(monkeypatch, cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert by_turns(settled(ServeSettings(**given))) is expected  # type: ignore[arg-type]


def test_what_services_are_told_of_threads() -> None:
    worker = child_environment({}, "decode-0", 5)
    assert (worker["OMP_NUM_THREADS"], worker["OPENBLAS_NUM_THREADS"]) == ("5", "1")
    assert worker["OMP_WAIT_POLICY"] == "PASSIVE"
    assert worker["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    for name in ("gateway", "block_store"):
        service = child_environment({}, name, 5)
        assert service["OMP_NUM_THREADS"] == "1" and "GLIBC_TUNABLES" not in service
    own = {"OMP_WAIT_POLICY": "ACTIVE", "OPENBLAS_NUM_THREADS": "3", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert child_environment(own, "decode", 5).items() >= own.items()
