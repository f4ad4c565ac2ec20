"""The limit on the duration of prefill steps, with steps whose times are computed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import SamplingParams, StoppingParams
from engine.sequence import Sequence
from prefill_svc.job import Job
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.step_limit import DEFAULT_S, LEAST_CHUNK, ChunkCost, StepLimit

TOKEN_S, PAIR_S = 2e-4, 5e-8
"""The cost of a model of 125M parameters on two slow cores: 0.2 s for the first 1,000 tokens, 0.25 s at 1,000."""
DECODE_S = 0.02


def job(num_tokens: int) -> Job:
    return Job([Sequence([1] * num_tokens, [], SamplingParams(), StoppingParams())], 0)


def duration(chunks: list[tuple[int, int]], cost: ChunkCost, fixed_s: float = 0.0) -> float:
    return fixed_s + sum(cost.seconds(*chunk) for chunk in chunks)


class Worker:
    """The real scheduler and limit, with a clock of its own."""

    def __init__(
        self, max_itl_s: float | None, cost: ChunkCost, decode_s: float = DECODE_S, budget: int = 2048
    ) -> None:
        self._cost = cost
        self.decode_s, self.decodes = decode_s, True
        self._limit = StepLimit(max_itl_s, lambda: self.decode_s, lambda: self.decodes)
        self.scheduler = PrefillScheduler(
            max_num_batched_tokens=budget, max_num_seqs=8, max_queue=64, limit=self._limit
        )

    def step(self, starts_decode: bool = False) -> tuple[list[tuple[Job, int]], float]:
        plan = self.scheduler.plan(lambda _: True)
        chunks = [(chunk.sequence.num_computed, chunk.num_tokens) for _, chunk in plan]
        seconds = duration(chunks, self._cost)
        self.scheduler.note_step(chunks, seconds, starts_decode=starts_decode)
        for item, chunk in plan:
            chunk.sequence.num_computed = chunk.end
            if item.is_computed:
                self.scheduler.remove(item)
        return [(item, num_tokens) for (item, _), (_, num_tokens) in zip(plan, chunks, strict=True)], seconds

    def run(self) -> list[float]:
        seconds = []
        while not self.scheduler.idle:
            seconds.append(self.step()[1])
        return seconds


def test_a_step_of_a_long_prompt_takes_no_longer_than_the_limit_at_any_position() -> None:
    worker = Worker(0.2, ChunkCost(TOKEN_S, PAIR_S))
    worker.scheduler.add(job(65_536))
    first, *later = worker.run()
    assert first > 0.2  # before the first step, nothing is known
    assert max(later[4:]) < 0.2 - DECODE_S + 0.01
    assert min(later[4:-1]) > 0.15  # the time is used


def test_without_a_limit_the_same_prompt_has_longer_and_longer_steps() -> None:
    """What the other tests show is the effect of the limit."""
    worker = Worker(1e9, ChunkCost(TOKEN_S, PAIR_S))
    worker.scheduler.add(job(65_536))
    seconds = worker.run()
    assert len(seconds) == 32
    assert seconds[-1] > 5.0


@given(
    st.floats(1e-5, 1e-2),
    st.floats(0.0, 1e-6),
    st.floats(0.05, 1.0),
    st.lists(st.integers(1, 5000), min_size=1, max_size=8),
)
def test_every_prompt_is_computed_whatever_the_cost(
    token_s: float, pair_s: float, max_itl_s: float, lengths: list[int]
) -> None:
    """Even if LEAST_CHUNK tokens take longer than the limit, a step computes them."""
    worker = Worker(max_itl_s, ChunkCost(token_s, pair_s))
    for length in lengths:
        worker.scheduler.add(job(length))
    steps = 0
    while not worker.scheduler.idle:
        plan, _ = worker.step()
        assert plan
        steps += 1
    assert steps <= sum(-(-length // LEAST_CHUNK) for length in lengths)


def test_prompts_keep_their_order_and_short_ones_share_a_step() -> None:
    worker = Worker(0.2, ChunkCost(TOKEN_S, 0.0))
    worker.scheduler.add(job(2048))
    worker.run()  # the cost is known afterwards
    long, short, last = job(1000), job(50), job(60)
    for item in (long, short, last):
        worker.scheduler.add(item)
    plan, _ = worker.step()
    while not worker.scheduler.idle and plan[-1][0] is not last:
        assert plan[0][0] is long
        plan, seconds = worker.step()
        assert seconds < 0.2
    assert [item for item, _ in plan] == [long, short, last]


def test_decode_steps_longer_than_the_limit_leave_prefill_a_quarter_of_it() -> None:
    worker = Worker(0.2, ChunkCost(TOKEN_S, 0.0), decode_s=5.0)
    worker.scheduler.add(job(20_000))
    seconds = worker.run()
    assert seconds[-2] == pytest.approx(0.05, abs=0.001)


def test_a_limit_that_no_step_meets_leaves_the_least_chunks() -> None:
    worker = Worker(1e-6, ChunkCost(TOKEN_S, 0.0), budget=128)
    counts = []
    for _ in range(2):
        worker.scheduler.add(job(161))
        counts.append(len(worker.run()))
    assert counts == [1 + -(-(161 - 128) // LEAST_CHUNK), -(-161 // LEAST_CHUNK)]  # the first step's cost is not known


@pytest.mark.parametrize(("decode_s", "expected_s"), [(0.01, DEFAULT_S - 0.01), (0.04, 6 * 0.04)])
def test_the_default_leaves_prefill_six_times_a_decode_step_on_slow_machines(
    decode_s: float, expected_s: float
) -> None:
    worker = Worker(None, ChunkCost(5 * TOKEN_S, 0.0), decode_s)
    worker.scheduler.add(job(20_000))
    seconds = worker.run()
    assert seconds[-2] == pytest.approx(expected_s, abs=0.005)


@pytest.mark.parametrize("max_itl_s", [0.2, None])
def test_steps_are_short_only_while_something_decodes(max_itl_s: float | None) -> None:
    worker = Worker(max_itl_s, ChunkCost(5 * TOKEN_S, 0.0))
    worker.scheduler.add(job(100_000))
    worker.step()

    def tokens(starts_decode: bool = False) -> int:
        [(_, num_tokens)], _ = worker.step(starts_decode)
        return num_tokens

    assert tokens() < 200
    worker.decode_s = 0.0
    assert tokens() < 200  # the decode worker is between two steps
    assert tokens() < 200
    worker.decodes = False
    assert tokens() == 2048
    assert tokens(starts_decode=True) == 2048
    assert tokens() < 300  # the decode that may be about to start would wait for this step
    assert tokens() == 2048  # it did not start
    worker.decode_s, worker.decodes = DECODE_S, True
    assert tokens() < 300


def test_a_pause_of_the_machine_is_forgotten() -> None:
    limit = StepLimit(0.2, lambda: DECODE_S, lambda: True)
    cost = ChunkCost(TOKEN_S, PAIR_S)
    for start in range(0, 8192, 512):
        limit.note_step([(start, 512)], duration([(start, 512)], cost), 0.0, False)
    limit.note_step([(8192, 512)], 30.0, 0.0, False)
    assert limit.cost.most_tokens(8192, 0.18) < 0.95 * cost.most_tokens(8192, 0.18)
    start = 8192
    for _ in range(30):
        num_tokens = max(LEAST_CHUNK, int(limit.cost.most_tokens(start, limit.step_s)))
        limit.note_step([(start, num_tokens)], duration([(start, num_tokens)], cost), 0.0, False)
        start += num_tokens
    assert limit.cost.most_tokens(start, 0.18) == pytest.approx(cost.most_tokens(start, 0.18), rel=0.05)


def test_a_machine_that_becomes_ten_times_slower_is_noticed_within_a_few_steps() -> None:
    limit = StepLimit(0.2, lambda: DECODE_S, lambda: True)
    for scale in (1, 10):
        slow = ChunkCost(scale * TOKEN_S, scale * PAIR_S)
        for start in range(0, 8192, 512):
            limit.note_step([(start, 512)], slow.seconds(start, 512), 0.0, False)
        assert limit.cost.most_tokens(8192, 0.18) == pytest.approx(slow.most_tokens(8192, 0.18), rel=0.2)


def test_steps_of_short_prompts_do_not_make_long_ones_look_expensive() -> None:
    """The times differ by 15 % for no reason, more than what the pairs of short prompts cost."""
    cost, rng = ChunkCost(TOKEN_S, PAIR_S), random.Random(0)
    limit = StepLimit(0.2, lambda: DECODE_S, lambda: True)
    found = []
    for number in range(100):
        chunks = [(0, rng.randrange(20, 150)) for _ in range(rng.randrange(2, 8))]
        limit.note_step(chunks, duration(chunks, cost) * rng.uniform(0.85, 1.15), 0.0, False)
        if number >= 10:
            found.append(limit.cost.most_tokens(1000, 0.1) / cost.most_tokens(1000, 0.1))
    assert 0.8 < min(found) < max(found) < 1.5


def test_steps_that_take_no_time_cost_nothing() -> None:
    """As in a simulation with costs of zero."""
    limit = StepLimit(0.2, lambda: DECODE_S, lambda: True)
    limit.note_step([(0, 100)], 0.0, 0.0, False)
    assert limit.cost == ChunkCost(0.0, 0.0)


def test_the_rest_of_a_step_leaves_less_time_for_its_pass() -> None:
    limit = StepLimit(0.2, lambda: DECODE_S, lambda: True)
    for _ in range(30):
        limit.note_step([(0, 100)], 0.1, 0.03, False)
    assert limit.step_s == pytest.approx(0.2 - DECODE_S - 0.03, rel=0.01)
    for _ in range(30):
        limit.note_step([(0, 100)], 0.1, 5.0, False)
    assert limit.step_s == pytest.approx(0.2 - DECODE_S - 0.05, rel=0.01), "a ledger that takes seconds"


@given(
    st.sampled_from((0.0, 1e-6, 1e-2)),
    st.sampled_from((0.0, 1e-9, 1e-6)),
    st.integers(0, 300_000),
    st.floats(1e-3, 10.0),
)
def test_the_most_tokens_take_the_given_time(token_s: float, pair_s: float, start: int, seconds: float) -> None:
    cost = ChunkCost(token_s, pair_s)
    num_tokens = cost.most_tokens(start, seconds)
    if math.isinf(num_tokens):
        assert token_s + pair_s * start == 0.0
    elif num_tokens > 1:
        n = int(num_tokens)
        assert cost.seconds(start, n) <= seconds * 1.0001
        assert cost.seconds(start, n + 1) >= seconds * 0.9999
