"""Preempted groups are swapped out and in, or given back, and have the same outputs as without preemption."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from block_store.errors import LedgerUnavailable
from common.types import SamplingParams, StoppingParams
from decode_svc.costs import Costs
from decode_svc.outputs import Rejection
from decode_svc.preemption import Choice, Preemption
from decode_svc.scheduler import Group
from decode_svc.swap import SwapSpace
from decode_svc.worker import DecodeWorker
from engine.model_runner import ModelRunner
from testing.decode import DOMAIN, DecodeBench
from testing.oracle import Oracle

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.5, seed=11)
STOPPING = StoppingParams(max_tokens=24)
PROMPTS = [np.random.default_rng(seed).integers(5, 500, length).tolist() for seed, length in enumerate((9, 14, 16, 7))]
NUM_BLOCKS = 40
BEAMS = SamplingParams(temperature=0.0, num_sequences=2, beam_width=4)


class Tight:
    """A worker with a host tier, and an arena that is too small for its load."""

    def __init__(self, bench: DecodeBench) -> None:
        self.bench = bench
        self.use("swap")

    def use(self, choice: Choice, num_swap: int = NUM_BLOCKS) -> None:
        bench = self.bench
        self.swap = SwapSpace(bench.runner, bench.attached, num_swap * bench.arena.block_bytes)
        self.preemption = Preemption(bench.scheduler, self.swap, choice)
        bench.worker = DecodeWorker(bench.runner, bench.attached, bench.scheduler, DOMAIN, self.preemption)

    def submit_all(self, sampling: SamplingParams, stopping: StoppingParams = STOPPING) -> None:
        for handle, prompt in enumerate(PROMPTS):
            self.bench.submit(handle, prompt, sampling, stopping)

    def answers(self) -> dict[int, dict[int, list[int]]]:
        return {handle: self.bench.inbox.ids(handle) for handle in range(len(PROMPTS))}

    def expected(
        self, sampling: SamplingParams, stopping: StoppingParams = STOPPING
    ) -> dict[int, dict[int, list[int]]]:
        judge = Oracle(self.bench.runner)
        if sampling.beam_width is not None:
            beams = [judge.beam_search(prompt, sampling, stopping) for prompt in PROMPTS]
            return {i: {rank: list(best.token_ids) for rank, best in enumerate(found)} for i, found in enumerate(beams)}
        samples = range(sampling.num_sequences)
        return {
            i: {n: judge.generate(prompt, sampling, stopping, sample_index=n) for n in samples}
            for i, prompt in enumerate(PROMPTS)
        }


@pytest.fixture
def tight(small_runner: ModelRunner, redis_client: Any, tmp_path: Path) -> Iterator[Tight]:
    bench = DecodeBench(small_runner, tmp_path, redis_client, num_blocks=NUM_BLOCKS)
    made = Tight(bench)
    yield made
    assert made.swap.num_free == made.swap.num_blocks
    bench.close()


@pytest.mark.parametrize(
    ("sampling", "stopping"),
    [
        (GREEDY, StoppingParams(max_tokens=40)),
        (SAMPLED, StoppingParams(max_tokens=40)),
        (replace(SAMPLED, num_sequences=4), STOPPING),
        (BEAMS, STOPPING),
    ],
    ids=["greedy", "sampled", "n=4", "beams"],
)
def test_swapped_groups_answer_as_the_oracle(tight: Tight, sampling: SamplingParams, stopping: StoppingParams) -> None:
    tight.submit_all(sampling, stopping)
    tight.bench.run(2000)
    assert tight.answers() == tight.expected(sampling, stopping)
    counts = tight.preemption.counts
    assert counts.swapped_groups == counts.resumed_groups > 0 and counts.given_back_groups == 0
    assert 0 < counts.resumed_blocks <= counts.swapped_blocks


def test_a_flipped_byte_in_the_host_tier_would_be_seen(tight: Tight, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that the tests above fail if a swapped block changes."""
    copy, flipped = tight.swap._copy, list[int]()

    def flip(src: Any, dst: Any, src_ids: list[int], dst_ids: list[int]) -> None:
        copy(src, dst, src_ids, dst_ids)
        if src is not tight.bench.runner.bound_arena and not flipped:
            flipped.append(dst_ids[-1])
            dst[dst_ids[-1], 3] ^= 0x40  # in the exponent of the first value, which is a key of layer 0

    monkeypatch.setattr(tight.swap, "_copy", flip)
    stopping = StoppingParams(max_tokens=40)
    tight.submit_all(SAMPLED, stopping)
    tight.bench.run(2000)
    assert flipped and tight.answers() != tight.expected(SAMPLED, stopping)


def test_what_is_not_to_be_swapped_is_given_back(tight: Tight) -> None:
    tight.use("give-back")
    tight.submit_all(replace(SAMPLED, num_sequences=4))
    tight.bench.run()
    rejections, counts = tight.bench.inbox.rejections, tight.preemption.counts
    assert set(rejections.values()) == {Rejection.GIVEN_BACK} and 0 not in rejections  # never the oldest group
    assert counts.given_back_groups == len(rejections) and counts.swapped_groups == 0


def test_where_the_host_tier_is_full_the_rest_is_given_back(tight: Tight) -> None:
    tight.use("swap", num_swap=12)
    sampling = replace(SAMPLED, num_sequences=4)
    tight.submit_all(sampling)
    tight.bench.run()
    rejections, counts = tight.bench.inbox.rejections, tight.preemption.counts
    assert counts.swapped_groups > 0 and counts.given_back_groups == len(rejections) > 0
    expected = tight.expected(sampling)
    done = [handle for handle in expected if handle not in rejections]
    assert done and all(tight.bench.inbox.ids(handle) == expected[handle] for handle in done)


def swap_one(tight: Tight, sampling: SamplingParams = SAMPLED) -> Group:
    """Runs two groups. Swaps out the second after three steps."""
    groups = [tight.bench.submit(i, PROMPTS[i], sampling, STOPPING) for i in range(2)]
    for _ in range(3):
        tight.bench.worker.step()
    assert tight.preemption.preempt(groups[1]) is None
    return groups[1]


def test_the_load_tells_of_swapped_sequences(tight: Tight) -> None:
    swap_one(tight, replace(SAMPLED, num_sequences=4))
    load = tight.bench.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_preempted) == (4, 0, 4)
    tight.bench.run()


@pytest.mark.parametrize("how", ["cancelled", "expired", "rejected", "fenced"])
def test_a_swapped_group_that_ends_leaves_nothing(tight: Tight, how: str) -> None:
    group, bench = swap_one(tight), tight.bench
    assert tight.swap.num_free < NUM_BLOCKS
    match how:
        case "cancelled":
            bench.worker.cancel(bench.inbox.session, group.handle)
        case "expired":
            group.deadline_ns = 1
            bench.worker.step()
        case "rejected":
            bench.worker.reject_all(Rejection.DRAINING)
        case "fenced":
            bench.held.release_many([s.table for s in bench.scheduler.running[0].live])  # like a renewal
            bench.attached.is_fenced, bench.attached.renew = True, lambda: None
            bench.worker.step()
            bench.attached.is_fenced = False
    assert tight.swap.num_free == NUM_BLOCKS and group not in tight.preemption
    bench.run()


def test_a_sample_that_is_cancelled_while_swapped_does_not_come_back(tight: Tight) -> None:
    sampling = replace(SAMPLED, num_sequences=4)
    group = swap_one(tight, sampling)
    tight.bench.worker.cancel(tight.bench.inbox.session, group.handle, 2)
    assert len(group.live) == 3
    tight.bench.run()
    expected, answers = tight.expected(sampling)[1], tight.bench.inbox.ids(1)
    assert {i: answers[i] for i in (0, 1, 3)} == {i: expected[i] for i in (0, 1, 3)}
    assert answers[2] == expected[2][: len(answers[2])] != expected[2]


def test_blocks_that_live_another_life_lose_their_group_only(tight: Tight) -> None:
    groups = [tight.bench.submit(i, PROMPTS[i], SAMPLED, STOPPING) for i in range(2)]
    tight.bench.worker.step()
    table = groups[1].live[0].table
    kept = table[0]
    tight.bench.arena.generations[kept.block] += 1
    tight.bench.worker._preempt(groups[1])
    tight.bench.arena.generations[kept.block] -= 1
    tight.bench.run()
    assert tight.bench.inbox.rejections == {1: Rejection.LOST} and tight.preemption.counts.lost_groups == 1
    assert tight.bench.inbox.ids(0) == tight.expected(SAMPLED)[0]


def test_an_urgent_request_takes_the_blocks_of_running_ones(tight: Tight) -> None:
    """The urgent request arrives last, when no block is free."""
    sampling, bench = replace(SAMPLED, num_sequences=4), tight.bench
    groups = [bench.submit(handle, PROMPTS[handle], sampling, STOPPING) for handle in range(2)]
    for _ in range(3):
        bench.worker.step()
    groups.append(bench.submit(2, PROMPTS[2], sampling, STOPPING, priority=-1))
    others = bench.prefill.alloc(NUM_BLOCKS - bench.held.num_held)
    bench.worker.step()
    assert bench.scheduler.running == [groups[2], groups[0]] and groups[1] in tight.preemption
    bench.prefill.release(others)
    bench.run(2000)
    expected = tight.expected(sampling)
    assert tight.answers() == {i: expected[i] if i < 3 else {} for i in expected}


def test_where_nothing_runs_a_waiting_group_makes_way_for_one_that_is_swapped(tight: Tight) -> None:
    bench = tight.bench
    first, second = swap_one(tight), bench.submit(2, PROMPTS[2], SAMPLED, STOPPING)
    bench.worker.cancel(bench.inbox.session, 0)
    others = bench.prefill.alloc(NUM_BLOCKS - bench.held.num_held - 2)  # too few without those of `second`
    bench.worker.step()
    assert bench.scheduler.running == [first] and second in tight.preemption
    bench.prefill.release(others)
    bench.run()
    expected, answers = tight.expected(SAMPLED), tight.answers()
    assert (answers[1], answers[2]) == (expected[1], expected[2])


def test_without_the_ledger_nobody_makes_way(tight: Tight, monkeypatch: pytest.MonkeyPatch) -> None:
    """No blocks are available, and preemption would not make any available either."""
    bench = tight.bench
    first, second = swap_one(tight), bench.submit(2, PROMPTS[2], SAMPLED, STOPPING)
    bench.worker.cancel(bench.inbox.session, 0)

    def unavailable(num_blocks: int) -> NoReturn:
        raise LedgerUnavailable("frozen")

    with monkeypatch.context() as frozen:
        frozen.setattr(bench.held, "alloc", unavailable)
        bench.worker.step()
    assert first in tight.preemption and second not in tight.preemption and len(second.live[0].table)
    bench.run()
    expected = tight.expected(SAMPLED)
    answers = tight.answers()
    assert (answers[1], answers[2]) == (expected[1], expected[2])


def test_costs_choose() -> None:
    costs = Costs()
    assert costs.swap_pays(1 << 30, 16) and costs.fixed_s == 0.0  # no step has been measured yet
    for num_tokens in (8, 32, 8, 32, 16):
        costs.note_step(num_tokens, 0.020 + 0.001 * num_tokens)
    assert (costs.token_s(), costs.fixed_s) == (pytest.approx(0.001), pytest.approx(0.020))
    assert costs.give_back_s(100) == pytest.approx(0.1)
    for _ in range(40):
        costs.note_copy(1_000_000, 0.001)
    assert costs.swap_s(50_000_000) == pytest.approx(0.1, rel=1e-3)
    assert costs.swap_pays(49_000_000, 100) and not costs.swap_pays(51_000_000, 100)


def test_a_single_slow_step_does_not_count() -> None:
    costs = Costs()
    for number in range(12):
        costs.note_step(4, 2.0 if number % 5 == 0 else 0.02)
    assert costs.step_s == pytest.approx(0.02)


def test_steps_of_one_size_stand_for_themselves() -> None:
    costs = Costs()
    for _ in range(10):
        costs.note_step(4, 0.02)
    assert (costs.token_s(), costs.fixed_s) == (pytest.approx(0.005), pytest.approx(0.0))


def test_copies_and_steps_are_what_costs_are_made_of(tight: Tight) -> None:
    costs, began = tight.preemption.costs, time.monotonic()
    costs.copy_bytes_per_s = 0.0
    swap_one(tight)
    assert 0 < costs.step_s < time.monotonic() - began
    assert costs.copy_bytes_per_s > tight.bench.arena.block_bytes, "more than a block a second"
    tight.bench.run()


def test_auto_goes_by_the_costs(tight: Tight) -> None:
    tight.use("auto")
    for _ in range(100):
        tight.preemption.costs.note_step(4, 10.0)
    group = swap_one(tight)
    assert group in tight.preemption
    tight.bench.run()
    for _ in range(3000):  # enough to replace all earlier measurements
        tight.preemption.costs.note_step(4, 1e-12)
    group = tight.bench.submit(3, PROMPTS[3], SAMPLED, STOPPING)
    assert tight.preemption.preempt(group) is Rejection.GIVEN_BACK
    tight.bench.run()
