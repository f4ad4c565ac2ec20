"""Isolation of suspects. A death is counted once per incarnation of a worker, and forgotten when the request
completes."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import Internal
from gateway.fleet.worker_lost import incarnation
from gateway.request.isolation import MOST_REMEMBERED, Isolation, digest_of
from testing.gateway.parts import make_record

DIGEST = digest_of([1, 2, 3], b"salt")


def test_two_deaths_of_different_workers_make_a_request_poison() -> None:
    isolation = Isolation()
    for _ in range(5):  # five equal requests lost the same worker
        isolation.died(DIGEST, "d0@1")
        isolation.check(DIGEST)
    isolation.died(DIGEST, "d0@2")
    with pytest.raises(Internal):
        isolation.check(DIGEST)
    isolation.check(digest_of([1, 2, 3], b"another tenant"))


def test_what_survives_is_forgotten_and_so_is_what_is_old() -> None:
    isolation = Isolation()
    isolation.died(DIGEST, "a")
    isolation.survived(DIGEST)
    isolation.died(DIGEST, "b")
    isolation.check(DIGEST)
    isolation.died(DIGEST, "c")
    for number in range(MOST_REMEMBERED):
        isolation.died(digest_of([number], b""), "d")
    isolation.check(DIGEST)


async def test_a_suspect_is_prefilled_alone() -> None:
    isolation = Isolation()
    for name in (b"guilty", b"neighbour"):
        isolation.died(name, "w0")
    inside: list[bytes] = []
    neighbours: dict[bytes, list[bytes]] = {}

    async def attempt(name: bytes, incarnation: str = "w1") -> None:
        entry = await isolation.enter(name, incarnation)
        inside.append(name)
        for _ in range(5):
            neighbours.setdefault(name, []).extend(inside)
            await asyncio.sleep(0)
        if name == b"guilty":
            isolation.died(name, incarnation)
        inside.remove(name)
        entry.leave()
        entry.leave()

    names = (b"unstruck", b"other", b"guilty", b"unstruck", b"neighbour", b"guilty", b"other")
    results = await asyncio.gather(*(attempt(name) for name in names), return_exceptions=True)
    assert [isinstance(result, Internal) for result in results] == [
        name == b"guilty" and i > 2 for i, name in enumerate(names)
    ]
    assert set(neighbours[b"guilty"]) == {b"guilty"} and set(neighbours[b"neighbour"]) == {b"neighbour"}
    assert {b"unstruck", b"other"} <= set(neighbours[b"unstruck"])  # requests that are not suspects run together
    isolation.check(b"neighbour")


async def test_another_worker_need_not_wait() -> None:
    """A suspect runs alone on one incarnation of a worker. Isolation without waiting requests is forgotten."""
    isolation = Isolation()
    isolation.died(DIGEST, "w0")
    async with asyncio.timeout(60):
        names = {DIGEST: "w1", b"other": "w2", b"third": "w2"}
        entries = [await isolation.enter(name, incarnation) for name, incarnation in names.items()]
    assert [entry.alone for entry in entries] == [True, False, False] and len(isolation._by_worker) == 2
    for entry in entries:
        entry.leave()
    del entries, entry
    assert len(isolation._by_worker) == 0


async def test_who_gives_up_waiting_holds_nothing() -> None:
    isolation = Isolation()
    isolation.died(DIGEST, "w0")
    other = await isolation.enter(b"other", "w1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await isolation.enter(DIGEST, "w1")
    async with asyncio.timeout(60):
        third = await isolation.enter(b"third", "w1")
    other.leave()
    third.leave()
    async with asyncio.timeout(60):
        assert (await isolation.enter(DIGEST, "w1")).alone


def test_one_process_with_both_roles_has_one_life() -> None:
    prefill, decode = (make_record(role, f"w.{role}", address="host:1") for role in ("prefill", "decode"))
    assert (
        incarnation(prefill) == incarnation(decode) != incarnation(make_record("decode", "w.decode", address="host:2"))
    )
