"""Limits on wrong keys: a bucket per address, a bounded number of buckets. Keys that have worked keep working."""

from __future__ import annotations

import pytest

from common.errors import ResourceExhausted
from gateway.api.grpc_service import address_of
from gateway.api.wrong_keys import MAX_ADDRESSES, WrongKeys

HOST, OTHER = "10.0.0.1", "10.0.0.2"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(keys: WrongKeys, address: str, key: bytes = b"k") -> float | None:
    """Returns the time to wait, or None if the key may be checked."""
    try:
        keys.check(address, key)
    except ResourceExhausted as error:
        assert "6 a minute" in error.message
        return error.retry_after_s
    return None


def test_tries_are_used_up_and_come_back(clock: Clock) -> None:
    keys = WrongKeys(6, clock)
    for _ in range(6):
        assert refused(keys, HOST) is None
        keys.wrong(HOST)
    assert refused(keys, HOST) == pytest.approx(10) and refused(keys, OTHER) is None
    clock.now += 9
    assert refused(keys, HOST) == pytest.approx(1)
    clock.now += 1.01
    assert refused(keys, HOST) is None
    keys.wrong(HOST)
    assert refused(keys, HOST) is not None
    clock.now += 3600
    for _ in range(6):
        assert refused(keys, HOST) is None
        keys.wrong(HOST)
    assert refused(keys, HOST) is not None, "a long time gives no more than a minute's tries"


def test_a_key_that_was_right_from_there_is_still_looked_at(clock: Clock) -> None:
    keys = WrongKeys(6, clock)
    keys.right(HOST, b"good")
    for _ in range(6):
        keys.wrong(HOST)
    assert refused(keys, HOST, b"good") is None and refused(keys, HOST, b"other") is not None
    keys.right(OTHER, b"elsewhere")
    assert refused(keys, HOST, b"elsewhere") is not None


def test_hosts_of_ipv6_are_their_networks(clock: Clock) -> None:
    keys = WrongKeys(6, clock)
    for number in range(6):
        keys.wrong(f"2001:db8:0:1::{number:x}")
    assert refused(keys, "2001:db8:0:1:ffff::1") is not None and refused(keys, "2001:db8:0:2::1") is None


def test_memory_is_bounded_and_zero_is_no_limit(clock: Clock) -> None:
    keys = WrongKeys(6, clock)
    for number in range(3 * MAX_ADDRESSES):
        keys.wrong(f"host-{number}")
        keys.right(f"host-{number}", b"k")
    assert len(keys._buckets) == MAX_ADDRESSES == len(keys._known)
    free = WrongKeys(0, clock)
    for _ in range(100):
        free.wrong(HOST)
    free.check(HOST, b"k")


@pytest.mark.parametrize(("peer", "address"), [("ipv4:10.0.0.1:4711", HOST), ("ipv6:%5B::1%5D:4711", "::1")])
def test_a_grpc_callers_address_has_no_port_and_no_escapes(peer: str, address: str) -> None:
    assert address_of(peer) == address
