"""Sequence groups in prefill: one forward pass, one ticket, one reference per block, the oracle's tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from block_store.errors import LedgerUnavailable
from block_store.ledger.inspection import inspect
from common.errors import Aborted, InvalidArgument
from common.types import Branch, FinishReason, SamplingParams, StoppingParams
from engine.beam_search import BeamSearch
from prefill_svc.events import Done
from prefill_svc.job import Job
from testing.oracle import Oracle

BLOCK = 16
PROMPT = list(range(10, 47))  # two full blocks and a partial one
SAMPLED = SamplingParams(temperature=1.0, seed=5, num_sequences=8, repetition_penalty=1.1, logprobs=2)
GREEDY = SamplingParams(temperature=0.0, num_sequences=8)
STOPPING = StoppingParams(max_tokens=60)
Make = Callable[..., Any]


def empty(n: int) -> list[Branch]:
    return [Branch(i) for i in range(n)]


@pytest.fixture(scope="module")
def outputs(oracle: Oracle) -> list[list[int]]:
    """Returns the outputs of three samples of PROMPT."""
    return [oracle.generate(PROMPT, SAMPLED, StoppingParams(max_tokens=46), sample_index=i) for i in range(3)]


def returned(outputs: list[list[int]], lens: list[int]) -> tuple[list[Branch], list[int]]:
    """Returns branches with these numbers of output tokens, and the next token of each."""
    pairs = list(zip(outputs, lens, strict=False))
    return [Branch(i, tuple(ids[:n])) for i, (ids, n) in enumerate(pairs)], [ids[n] for ids, n in pairs]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 37])
def test_samples_are_drawn_from_one_pass_and_share_one_ticket(make_world: Make, oracle: Oracle, length: int) -> None:
    world, prompt = make_world(), PROMPT[:length]
    expected = [oracle.draw(prompt, SAMPLED, StoppingParams(max_tokens=1), sample_index=i)[0] for i in range(4)]
    assert len({sampled.token_id for sampled in expected}) > 1
    done = world.prefill(prompt, empty(4), SAMPLED, STOPPING)
    assert [(token.sample_index, token.token_id) for token in done.tokens] == [
        (i, sampled.token_id) for i, sampled in enumerate(expected)
    ]
    for token, sampled in zip(done.tokens, expected, strict=True):
        assert token.logprob.rank == sampled.logprob.rank
        assert token.logprob.logprob == pytest.approx(sampled.logprob.logprob, abs=1e-4)
    assert world.num_computed == length
    assert done.ticket.num_tokens == (length,) * 4 and len(set(done.ticket.tables)) == 1
    held = world.claim(done.ticket)
    assert len(held) == -(-length // BLOCK), "one reference per block, however many share it"
    assert [world.claimer.count(ref) for ref in held] == [4] * len(held)


def test_what_is_handed_over_does_not_grow_with_n(make_world: Make) -> None:
    world, held = make_world(), {}
    for n in (1, 2, 8):
        done = world.prefill([n, *PROMPT], empty(n), SAMPLED, STOPPING)
        held[n] = len(world.claim(done.ticket))
    assert held == dict.fromkeys((1, 2, 8), 3)


@pytest.mark.parametrize("budget", [16, 64, 512])
@pytest.mark.parametrize("cached", [False, True])
def test_branches_that_come_back_compute_their_trunk_once(
    make_world: Make, outputs: list[list[int]], budget: int, cached: bool
) -> None:
    world = make_world(budget=budget)
    branches, expected = returned(outputs, [3, 40, 20])
    if cached:
        world.prefill(PROMPT, empty(1), SAMPLED, STOPPING)
        world.num_computed = 0
    done = world.prefill(PROMPT, branches, SAMPLED, STOPPING)
    assert [token.token_id for token in done.tokens] == expected
    lens = [len(PROMPT) + len(branch.output_ids) for branch in branches]
    assert done.ticket.num_tokens == tuple(lens)
    shared = 2 * BLOCK  # the prompt's full blocks; the samples differ in their first token
    assert world.num_computed == sum(length - shared for length in lens) + (0 if cached else shared)
    assert done.sources.cached == (shared if cached else 0) and done.sources.computed == len(PROMPT) - shared * cached
    tables = [groups[0] for groups in done.ticket.tables]
    assert len({table[:2] for table in tables}) == 1
    assert len({ref for table in tables for ref in table}) == 2 + sum(-(-n // BLOCK) - 2 for n in lens)
    world.claim(done.ticket)
    assert [world.claimer.count(ref) for ref in tables[0][:3]] == [3, 3, 1]


def test_each_branch_finds_its_own_cached_prefix(make_world: Make, outputs: list[list[int]]) -> None:
    world = make_world()
    branches, expected = returned(outputs, [30, 45])
    for branch in branches:
        world.prefill(PROMPT, [branch], SAMPLED, STOPPING)
    world.num_computed = 0
    done = world.prefill(PROMPT, branches, SAMPLED, STOPPING)
    assert [token.token_id for token in done.tokens] == expected
    assert world.num_computed == sum((len(PROMPT) + n - 1) % BLOCK + 1 for n in (30, 45)), "the tails only"


def test_branches_with_equal_outputs_are_computed_once(make_world: Make, oracle: Oracle) -> None:
    world = make_world()
    ids = oracle.generate(PROMPT, GREEDY, StoppingParams(max_tokens=10))
    one, other = Branch(1, tuple(ids[:9])), Branch(3, (*ids[:5], 7))
    done = world.prefill(PROMPT, [one, other, replace(one, sample_index=2)], GREEDY, STOPPING)
    assert [token.sample_index for token in done.tokens] == [1, 3, 2]
    assert done.tokens[0].token_id == done.tokens[2].token_id == ids[9]
    assert world.num_computed == len(PROMPT) + 9 + len(PROMPT) + 6 - 2 * BLOCK
    tables = done.ticket.tables
    assert tables[0] == tables[2] != tables[1] and done.ticket.num_tokens == (46, 43, 46)


def test_what_a_job_has_still_to_compute_and_what_its_sequences_share() -> None:
    """A prompt of 6 tokens, the outputs of three samples, and blocks of 4. Each sample computes its own newest
    token."""
    branches = [Branch(i, ids) for i, ids in enumerate([(7, 7, 7, 7, 7), (7, 7), (7, 8, 8)])]
    job = Job.of([5] * 6, branches, SAMPLED, STOPPING)
    assert job.common == [0, 8, 7]
    assert [job.shared_blocks(i, 4) for i in range(3)] == [0, 1, 1]
    assert job.num_uncomputed == 11 + (8 - 8) + (9 - 7)
    job.sequences[0].num_computed, job.sequences[2].num_computed = 4, 8
    assert job.num_uncomputed == 7 + 0 + 1


def test_times_of_a_job(make_world: Make) -> None:
    world, events = make_world(), list[Any]()
    job = Job.of(PROMPT, [Branch()], GREEDY, STOPPING)
    began = job.arrived_ns = time.monotonic_ns()
    world.worker.submit(job, b"", events.append)
    world.run(events)
    timings = events[-1].timings
    assert 0 < timings.queue_ns < timings.queue_ns + timings.prefill_ns <= time.monotonic_ns() - began
    world.claim(events[-1].ticket)


def test_a_group_that_does_not_fit_waits_and_holds_nothing(make_world: Make, outputs: list[list[int]]) -> None:
    world = make_world(num_blocks=8)
    branches, expected = returned(outputs, [3, 40])  # 3 + 5 blocks, of which 2 are shared: 6
    taken = world.claimer.alloc(3)
    events = world.submit(PROMPT, branches, SAMPLED, STOPPING)
    for _ in range(3):
        assert world.worker.step() > 0
        assert not events and world.held.num_held == 0
    world.claimer.release(taken)
    world.run(events)
    assert [token.token_id for token in events[-1].tokens] == expected


def test_a_group_that_can_never_fit_is_refused(make_world: Make, outputs: list[list[int]]) -> None:
    world = make_world(num_blocks=5)
    [error] = world.submit(PROMPT, returned(outputs, [3, 40])[0], SAMPLED, STOPPING)
    assert isinstance(error, InvalidArgument) and "needs 6 blocks of KV with all its branches" in str(error)


def test_branches_that_end_with_their_token_are_not_handed_over(make_world: Make, oracle: Oracle) -> None:
    world = make_world()
    first = [oracle.generate(PROMPT, SAMPLED, StoppingParams(max_tokens=1), sample_index=i)[0] for i in range(4)]
    done = world.prefill(PROMPT, empty(4), SAMPLED, replace(STOPPING, stop_token_ids=(first[1],)))
    reasons = [FinishReason.STOP if token == first[1] else None for token in first]
    assert [token.finish_reason for token in done.tokens] == reasons and None in reasons
    assert len(done.ticket.tables) == reasons.count(None)
    world.claim(done.ticket)
    done = world.prefill(PROMPT, empty(4), SAMPLED, StoppingParams(max_tokens=1))
    assert done.ticket is None and [token.token_id for token in done.tokens] == first


def test_equal_groups_in_one_step_end_up_in_the_same_blocks(make_world: Make, outputs: list[list[int]]) -> None:
    """When both are sealed, the second group drops its trunk blocks and uses those of the first, and so do its
    branches.
    """
    world = make_world()
    branches, expected = returned(outputs, [3, 40])
    both = [world.submit(PROMPT, branches, SAMPLED, STOPPING) for _ in range(2)]
    world.run(*both)
    tables = []
    for events in both:
        assert [token.token_id for token in events[-1].tokens] == expected
        world.claim(events[-1].ticket)
        tables += [groups[0] for groups in events[-1].ticket.tables]
    assert len({table[:2] for table in tables}) == 1
    assert world.claimer.count(tables[0][0]) == 4


def test_a_beam_search_gets_its_candidates_and_one_table(make_world: Make, oracle: Oracle) -> None:
    world = make_world()
    sampling = SamplingParams(beam_width=4, num_sequences=2, logit_bias=((300, 3.0),))
    stopping = replace(STOPPING, stop_token_ids=(2,))
    samples = world.submit([1, *PROMPT], empty(2), SAMPLED, STOPPING)
    beams = world.submit(PROMPT, empty(1), sampling, stopping)
    world.run(samples, beams)
    done = beams[-1]
    assert isinstance(done, Done) and len(samples[-1].tokens) == 2 and samples[-1].candidates is None
    logits = oracle.logits(PROMPT)[-1].clone()
    logits[300] += 3.0
    top = torch.log_softmax(logits, 0).sort(descending=True, stable=True)
    count = BeamSearch(sampling, stopping, len(PROMPT), 256).num_candidates
    assert done.candidates.token_ids == top.indices[:count].tolist()
    assert done.candidates.logprobs == pytest.approx(top.values[:count].tolist(), abs=1e-4)
    assert done.tokens == () and len(done.ticket.tables) == 1 and done.ticket.num_tokens == (len(PROMPT),)


def test_prompt_logprobs_come_once_and_count_nothing_as_cached(
    make_world: Make, oracle: Oracle, outputs: list[list[int]]
) -> None:
    world = make_world(budget=16)
    branches, expected = returned(outputs, [3, 40])
    world.prefill(PROMPT, empty(1), SAMPLED, STOPPING)
    done = world.prefill(PROMPT, branches, replace(SAMPLED, prompt_logprobs=0), STOPPING)
    assert [token.token_id for token in done.tokens] == expected
    assert [item.token_id for item in done.prompt_logprobs] == PROMPT[1:]
    rows = torch.log_softmax(oracle.logits(PROMPT), 1)
    found = [item.logprob for item in done.prompt_logprobs]
    expected_logprobs = [float(rows[i, token]) for i, token in enumerate(PROMPT[1:])]
    assert found == pytest.approx(expected_logprobs, abs=1e-4)
    assert done.sources.cached == 0


def test_a_stale_trunk_costs_the_whole_group(make_world: Make, outputs: list[list[int]]) -> None:
    world = make_world(budget=64)
    events = world.submit(PROMPT, returned(outputs, [3, 40])[0], SAMPLED, STOPPING)
    world.worker.step()
    [ref] = [ref for ref in world.held.holder.holdings() if world.held.count(ref) == 2][:1]
    kept = int(world.arena.generations[ref.block])
    world.arena.generations[ref.block] += 1  # the block is reallocated
    world.run(events)
    world.arena.generations[ref.block] = kept
    assert isinstance(events[-1], Aborted) and world.held.num_held == 0


def test_a_hand_over_that_the_ledger_does_not_answer_is_made_later(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    hand_over, refused = world.held.hand_over, []

    def silent_twice(tables: Any, attempt: Any) -> Any:
        if len(refused) < 2:
            refused.append(tables)
            raise LedgerUnavailable("no answer")
        return hand_over(tables, attempt)

    monkeypatch.setattr(world.held, "hand_over", silent_twice)
    done = world.prefill(PROMPT, empty(3), SAMPLED, STOPPING)
    assert len(refused) == 2 and len(done.tokens) == 3
    assert len(world.claim(done.ticket)) == 3


def test_a_cancelled_group_releases_all_its_branches(make_world: Make, outputs: list[list[int]]) -> None:
    world = make_world(budget=16)
    job = Job.of(PROMPT, returned(outputs, [3, 40])[0], SAMPLED, STOPPING)
    world.worker.submit(job, b"", lambda event: None)
    world.worker.step()
    assert world.held.num_held == 6
    world.worker.cancel(job)
    assert world.held.num_held == 0 and world.worker.step() is None


def test_a_ticket_whose_caller_has_gone_is_ended_at_once(make_world: Make) -> None:
    """The request is cancelled after the prompt is done and before the caller gets the result."""
    world, events = make_world(), []
    job = Job.of(PROMPT, empty(2), SAMPLED, STOPPING)
    world.worker.submit(job, b"", events.append)
    world.run(events)
    assert any(holder.kind == "ticket" for holder in inspect(world.ledger).holders)
    world.worker.cancel(job)
    assert not any(holder.kind == "ticket" for holder in inspect(world.ledger).holders)
    assert inspect(world.ledger).counts.sealed == 0


def test_a_prompt_that_waits_for_its_hand_over_can_be_cancelled(
    make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has handed the prompt over, but the answer is lost."""
    world, events = make_world(), []
    world.held.holder.lane.budget_s = -1.0
    hand_over = world.ledger.hand_over

    def unheard(*args: Any) -> Any:
        hand_over(*args)
        raise LedgerUnavailable("the answer was lost")

    job = Job.of(PROMPT, empty(2), SAMPLED, STOPPING)
    with monkeypatch.context() as patched:
        patched.setattr(world.ledger, "hand_over", unheard)
        world.worker.submit(job, b"", events.append)
        for _ in range(20):
            world.worker.step()
    assert not any(isinstance(event, Done) for event in events)
    world.worker.cancel(job)
    world.held.holder.lease.probe()
    world.held.holder.holdings()
    world.held.assert_idle()
    assert not any(holder.kind == "ticket" for holder in inspect(world.ledger).holders)
