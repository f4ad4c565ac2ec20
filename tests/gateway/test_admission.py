"""Admission: the tenants' shares of the queue, the predicted wait, quotas, priorities."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.api_keys import TenantLimits
from common.errors import InvalidArgument, LooseleafError, PermissionDenied, ResourceExhausted, Unavailable
from common.types import SamplingParams, StoppingParams
from gateway.admission.admission import Admission, Entry, Reason
from gateway.admission.gate import Gate
from gateway.admission.tenants import Tenants
from gateway.intake.resolved_request import ResolvedRequest


def request(n: int = 1, tokens: int = 10, priority: int = 0) -> ResolvedRequest:
    """Returns a request that costs `n * tokens`, plus one token for its prompt."""
    sampling = replace(SamplingParams(), num_sequences=n)
    return ResolvedRequest("r", [1], sampling, replace(StoppingParams(), max_tokens=tokens), 1.0, priority=priority)


class Door:
    """An admission with a manual clock, and the reasons for its refusals."""

    def __init__(self, limit: int, max_wait_s: float = 10.0, **limits: TenantLimits) -> None:
        self.now = 0.0
        self.refused: list[Reason] = []
        self.gate = Gate(lambda: 4, clock=lambda: self.now)
        self.tenants = Tenants(limits, 0.0)
        self.admission = Admission(
            limit, max_wait_s, self.gate, self.tenants, self.refused.append, clock=lambda: self.now
        )

    def come(self, tenant: str, *requests: ResolvedRequest) -> Entry:
        """Admits a request whose body arrives at once."""
        entry = self.admission.enter(tenant)
        try:
            entry.take(requests or [request()])
        except LooseleafError:
            entry.close()
            raise
        return entry

    def is_refused(self, reason: Reason, call: Callable[[], Entry]) -> LooseleafError:
        with pytest.raises((ResourceExhausted, PermissionDenied)) as caught:
            call()
        assert self.refused.pop() is reason
        return caught.value


def test_one_tenant_alone_has_the_whole_queue_and_no_more() -> None:
    door = Door(3)
    with door.come("a", request(n=2)), door.come("a"):
        error = door.is_refused(Reason.QUEUE_FULL, lambda: door.come("a"))
        assert "the limit is 3" in error.message and error.retry_after_s is not None
        assert door.admission.current == 3 and door.admission.num_requests == 2
    assert door.admission.current == door.admission.num_requests == 0
    for requests, field in (([request(n=4)], "n"), ([request(), request(n=3)], "prompt")):
        with pytest.raises(
            InvalidArgument, match=f"{field} must make at most 3 sequences .max_queue., got 4"
        ) as refusal:
            door.come("a", *requests)
        assert refusal.value.violations[0].field == field and not door.refused
    assert door.admission.current == door.admission.num_requests == 0
    door.admission.draining = True
    with pytest.raises(Unavailable):
        door.come("a")


def test_a_newcomer_is_let_in_when_another_has_filled_the_queue_and_that_one_waits_for_its_share() -> None:
    door = Door(8)
    greedy = [door.come("a") for _ in range(8)]
    few = [door.come("b", request(n=3)), door.come("b")]
    error = door.is_refused(Reason.QUEUE_FULL, lambda: door.come("b"))
    assert "of which 4 are yours" in error.message
    for entry in greedy[:4]:
        door.is_refused(Reason.QUEUE_FULL, lambda: door.come("a"))
        entry.close()
    assert door.admission.current == 8
    greedy[4].close()
    greedy[4].close()
    assert door.admission.current == 7, "closed twice, counted once"
    door.come("a").close()
    for entry in [*greedy, *few]:
        entry.close()
    assert door.admission.current == 0 and not door.admission._sequences


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 6)), max_size=120))
def test_nobody_is_refused_within_an_even_share_and_the_queue_stays_bounded(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    """A step of 0 ends the tenant's oldest request. Any other number adds a request with this many sequences."""
    door = Door(limit)
    inside: dict[str, list[Entry]] = {tenant: [] for tenant in "abcd"}

    def held(tenant: str) -> int:
        return sum(entry.num_sequences for entry in inside[tenant])

    for tenant, n in steps:
        if n == 0:
            if inside[tenant]:
                inside[tenant].pop(0).close()
            continue
        present = len({name for name in inside if inside[name]} | {tenant})
        may = held(tenant) + n <= limit // present or sum(map(held, inside)) + n <= limit
        try:
            inside[tenant].append(door.come(tenant, request(n=n)))
        except (ResourceExhausted, InvalidArgument):
            assert not may
        assert sum(map(held, inside)) <= limit * (1 + 1 / 2 + 1 / 3 + 1 / 4) + 4
        assert door.admission.current == sum(map(held, inside))


def test_requests_and_tokens_a_minute_come_back_evenly_and_what_was_not_used_at_once() -> None:
    limits = TenantLimits(requests_per_minute=6, tokens_per_minute=60)
    door = Door(100, a=limits)
    first = door.come("a", request(tokens=39), request(tokens=9))  # 50 tokens, 2 requests
    error = door.is_refused(Reason.TOKENS, lambda: door.come("a", request(tokens=29)))
    assert error.retry_after_s == pytest.approx(20.0) and "60 tokens per minute" in error.message
    door.come("other", request(tokens=500)).close()
    door.admission.used("a", 12)
    first.close()
    door.come("a", request(tokens=29)).close()  # 48 tokens are left
    for _ in range(2):
        door.come("a", request(tokens=1)).close()
    error = door.is_refused(Reason.REQUESTS, lambda: door.admission.enter("a"))
    assert error.retry_after_s == pytest.approx(10.0), "one in ten seconds"
    door.now += 12.0
    door.come("a", request(tokens=900)).close()  # more than a full bucket: admitted when the bucket is full
    door.now += 10.0
    door.admission.used("a", 300)
    door.is_refused(Reason.TOKENS, lambda: door.come("a", request(tokens=9)))


@pytest.mark.parametrize(("per_minute", "used"), [(1, 0), (3, 1), (8, 5)])
def test_a_refused_batch_is_admitted_after_its_retry_time_even_if_it_is_larger_than_the_quota(
    per_minute: int, used: int
) -> None:
    door = Door(100, a=TenantLimits(requests_per_minute=per_minute))
    batch = [request() for _ in range(4)]
    for _ in range(used):
        door.come("a").close()
    if used:
        error = door.is_refused(Reason.REQUESTS, lambda: door.come("a", *batch))
        assert error.retry_after_s == pytest.approx((min(4, per_minute) - per_minute + used) * 60.0 / per_minute)
        door.now += error.retry_after_s + 1e-6
    door.come("a", *batch).close()


def test_limits_that_are_read_again_count_at_once_and_forget_nothing() -> None:
    door = Door(100, a=TenantLimits(requests_per_minute=2))
    for _ in range(2):
        door.come("a").close()
    door.is_refused(Reason.REQUESTS, lambda: door.admission.enter("a"))
    door.tenants.replace({"a": TenantLimits(requests_per_minute=3)}, door.now)
    door.come("a").close()
    door.is_refused(Reason.REQUESTS, lambda: door.admission.enter("a"))
    door.tenants.replace({}, door.now)
    door.come("a").close()


def test_a_priority_beyond_the_best_one_of_the_tenant_is_refused() -> None:
    door = Door(100, a=TenantLimits(best_priority=-1))
    for priority in (-1, 0, 7):
        door.come("a", request(priority=priority)).close()
    error = door.is_refused(Reason.PRIORITY, lambda: door.come("a", request(), request(priority=-2)))
    assert "priority -2 is below -1" in error.message
    door.come("b", request(priority=-(2**31))).close()
    assert door.admission.current == 0


async def test_a_wait_that_is_too_long_is_refused_and_told() -> None:
    door = Door(1000, max_wait_s=2.0)
    waiting = [door.come("a") for _ in range(60)]  # the rate is unknown, so only the queue's bound counts
    tasks = [asyncio.create_task(door.gate.enter(0, "a", 1, 11)) for _ in waiting]
    await asyncio.sleep(0)
    for number in range(20):  # ten per second, in order of arrival
        door.now += 0.1
        door.gate.leave(await tasks[number])
        waiting.pop().close()
        await asyncio.sleep(0)
    error = door.is_refused(Reason.QUEUE_WAIT, lambda: door.admission.enter("a"))
    assert error.retry_after_s == pytest.approx(3.7, rel=0.01) and door.admission.wait_s("a") == pytest.approx(
        3.7, rel=0.01
    )
    assert door.admission.wait_s("b") == 0.0, "its place is reserved"
    door.come("b").close()
    for number in range(20, 40):
        door.now += 0.1
        door.gate.leave(await tasks[number])
        waiting.pop().close()
        await asyncio.sleep(0)
    burst = []
    with pytest.raises(ResourceExhausted, match="the limit is 2 s"):
        while len(burst) < 50:  # at the same instant: requests that are not at the gate yet also count
            burst.append(door.admission.enter("a"))
    assert 3 <= len(burst) <= 4, "16 wait already, ten a second are served"
    for task in tasks[40:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_answer_that_has_left_its_place_is_no_work_before_anybody() -> None:
    """The client of the answer is still reading. Many requests end together, and the next ones arrive before the last
    bytes are sent.
    """
    door = Door(1000, max_wait_s=0.0)
    for _ in range(5):
        entries = [door.come("a") for _ in range(4)]
        places = [await door.gate.enter(0, "a", 1, 11) for _ in entries]
        door.now += 1.0
        for place in places:
            door.gate.leave(place)
        assert door.admission.current == 4
        [entry.close() for entry in [*entries, *(door.come("a") for _ in range(4))]]
    coming = [door.admission.enter("a") for _ in range(4)]
    door.is_refused(Reason.QUEUE_WAIT, lambda: door.admission.enter("a"))
    for entry in coming:
        entry.close()
    assert door.admission.wait_s("a") == 0.0 and not door.admission._coming
