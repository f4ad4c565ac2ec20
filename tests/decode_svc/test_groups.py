"""Samples of one request on decode share blocks and copy on write. Each has the output that it has alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.ticket import TicketId
from common.types import Branch, FinishReason, SamplingParams, StoppingParams
from decode_svc import worker
from decode_svc.outputs import Rejection
from testing.decode import DecodeBench
from testing.oracle import Oracle

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.5, seed=11)
STOPPING = StoppingParams(max_tokens=24)
PROMPTS = {length: np.random.default_rng(length).integers(5, 500, length).tolist() for length in (1, 15, 16, 17, 33)}
Oracles = dict[int, list[int]]


def oracle(bench: DecodeBench, prompt: list[int], sampling: SamplingParams, stopping: StoppingParams) -> Oracles:
    judge = Oracle(bench.runner)
    return {
        index: judge.generate(prompt, sampling, stopping, sample_index=index) for index in range(sampling.num_sequences)
    }


@pytest.mark.parametrize("length", PROMPTS)
def test_every_sample_is_what_it_is_alone(ordinary: DecodeBench, length: int) -> None:
    asked = [replace(params, num_sequences=n) for params in (GREEDY, SAMPLED) for n in (1, 2, 4, 8)]
    for handle, sampling in enumerate(asked):
        ordinary.submit(handle, PROMPTS[length], sampling, STOPPING)
    assert ordinary.run() == STOPPING.max_tokens - 1  # every sample takes part in every step
    alone = oracle(ordinary, PROMPTS[length], replace(SAMPLED, num_sequences=8), STOPPING)
    [greedy] = oracle(ordinary, PROMPTS[length], GREEDY, STOPPING).values()
    for handle, sampling in enumerate(asked):
        expected = {i: greedy if sampling.greedy else alone[i] for i in range(sampling.num_sequences)}
        assert ordinary.inbox.ids(handle) == expected


def test_samples_that_end_at_different_times(small: DecodeBench) -> None:
    sampling, stopping = replace(SAMPLED, num_sequences=8), StoppingParams(30, 2, tuple(range(0, 500, 25)))
    small.submit(1, PROMPTS[17], sampling, stopping)
    small.run()
    expected = oracle(small, PROMPTS[17], sampling, stopping)
    assert small.inbox.ids(1) == expected and len({len(ids) for ids in expected.values()}) > 3
    reasons = {answer.finish_reason for answer in small.inbox.answers[1].values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_the_prompt_is_there_once_and_its_partial_block_until_all_have_copied(small: DecodeBench) -> None:
    group = small.submit(1, PROMPTS[17], replace(SAMPLED, num_sequences=4), STOPPING)
    assert small.held.num_held == 5 and all(small.held.count(ref) == 4 for ref in group.live[0].table)
    copied: list[Any] = []
    copy = small.runner.copy_blocks
    small.runner.copy_blocks = lambda *ids: copied.append(ids) or copy(*ids)  # type: ignore[method-assign,func-returns-value]
    try:
        small.worker.step()
        tails = [sequence.table[4].block for sequence in group.live]
        assert [(len(src), len(set(src)), dst) for src, dst in copied] == [(4, 1, tails)], "one call"
        assert small.held.num_held == 4 + 4 and len(set(tails)) == 4
        small.worker.step()
        assert len(copied) == 1
    finally:
        del small.runner.copy_blocks
    small.run()


def test_equal_samples_share_their_full_blocks(small: DecodeBench) -> None:
    """Greedy samples fill equal blocks in the same step. Of several blocks with equal hashes in one seal, the first
    stays.
    """
    small.worker._blocks._clock = itertools.count().__next__  # a call seals the blocks of each step
    group = small.submit(1, PROMPTS[16], replace(GREEDY, num_sequences=4), STOPPING)
    for _ in range(9):  # 16 + 9 positions: each sample fills two blocks and begins a third
        small.worker.step()
    assert [len(s.table) for s in group.live] == [7] * 4
    assert small.held_by(group.live) == {ref.block for ref in group.live[0].table[:6]} | {
        s.table[6].block for s in group.live
    }
    assert small.held.num_held == 6 + 4
    small.run()


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_skipped_copy_shows(small: DecodeBench, monkeypatch: pytest.MonkeyPatch, skipped: int) -> None:
    """Checks that the tests above can fail."""
    copy = small.runner.copy_blocks

    def skip_one(sources: list[int], targets: list[int]) -> None:
        keep = [i for i in range(len(sources)) if i != skipped]
        small.arena.data[targets[skipped]] = 0
        copy([sources[i] for i in keep], [targets[i] for i in keep])

    monkeypatch.setattr(small.runner, "copy_blocks", skip_one)
    sampling = replace(SAMPLED, num_sequences=4)
    small.submit(1, PROMPTS[17], sampling, STOPPING)
    small.run()
    monkeypatch.undo()
    expected = oracle(small, PROMPTS[17], sampling, STOPPING)
    differing = [index for index in range(4) if small.inbox.ids(1)[index] != expected[index]]
    assert differing == [skipped]


def test_a_cancelled_sample_gives_its_blocks_up_and_the_others_go_on(small: DecodeBench) -> None:
    sampling = replace(SAMPLED, num_sequences=4)
    group = small.submit(1, PROMPTS[33], sampling, STOPPING)
    small.worker.cancel(small.inbox.session, 1, 0)  # before its first step
    for _ in range(6):
        small.worker.step()
    held = small.held.num_held
    own = len(small.held_by(group.live)) - len(small.held_by([s for s in group.live if s.sample_index != 2]))
    small.worker.cancel(small.inbox.session, 1, 2)
    small.worker.cancel(small.inbox.session, 1, 7)  # this sample does not exist
    small.worker.cancel(small.inbox.session, 9, 0)
    assert small.held.num_held == held - own and own == 2
    small.run()
    expected, heard = oracle(small, PROMPTS[33], sampling, STOPPING), small.inbox.ids(1)
    assert (heard[0], heard[2]) == (expected[0][:1], expected[2][:7])
    assert (heard[1], heard[3]) == (expected[1], expected[3])


def test_the_last_sample_cancelled_ends_the_group(small: DecodeBench) -> None:
    small.submit(1, PROMPTS[1], replace(SAMPLED, num_sequences=2), STOPPING)
    small.worker.step()
    for index in (0, 1):
        small.worker.cancel(small.inbox.session, 1, index)
    assert small.worker.step() is None and not small.inbox.session.groups and small.held.num_held == 0


def test_branches_come_back_with_what_they_have(small: DecodeBench) -> None:
    """The branches have different lengths. One has ended, and two are equal so far."""
    sampling, stopping = replace(SAMPLED, num_sequences=5), StoppingParams(max_tokens=24, stop_token_ids=(499,))
    expected = oracle(small, PROMPTS[15], sampling, stopping)
    lengths = {0: 3, 1: 0, 3: 9, 4: 0}
    branches = [Branch(index, tuple(expected[index][:length])) for index, length in lengths.items()]
    small.submit(1, PROMPTS[15], sampling, stopping, branches)
    small.run()
    assert small.inbox.ids(1) == {index: expected[index] for index in lengths}


def test_only_what_can_finish_is_taken(small: DecodeBench) -> None:
    """16 + 24 positions are 10 blocks of 4, of which 4 are shared. Each of three sequences may copy one more: 4 + 3 *
    7."""
    sampling = replace(SAMPLED, num_sequences=3)
    small.attached.floor_blocks = 24
    small.submit(1, PROMPTS[16], sampling, STOPPING)
    small.attached.floor_blocks = 25
    small.submit(2, PROMPTS[16], sampling, STOPPING)
    small.run()
    small.scheduler.max_num_seqs = 2
    small.submit(3, PROMPTS[16], sampling, STOPPING)
    small.run()
    assert small.inbox.rejections == {1: Rejection.TOO_LARGE, 3: Rejection.TOO_LARGE}


def test_the_load_counts_sequences_and_blocks(small: DecodeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    small.scheduler.max_num_seqs = 4
    for handle in (1, 2):
        small.submit(handle, PROMPTS[17], replace(SAMPLED, num_sequences=3), STOPPING)
    small.worker.step()
    load = small.inbox.loads[-1]
    assert (load.num_running, load.num_waiting, load.total_blocks) == (3, 3, 256)
    small.held.holder.lease.beat()
    monkeypatch.setattr(worker, "LOAD_S", 0.0)
    small.worker.step()  # allocates no block
    assert small.inbox.loads[-1].free_blocks == 256 - small.held.num_held
    small.run()


def test_the_load_is_computed_again_if_the_queues_change_or_some_time_has_passed(
    small: DecodeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOAD_S", float("inf"))
    small.submit(1, PROMPTS[17], SAMPLED, StoppingParams(max_tokens=20))
    small.worker.step()
    before = small.worker.load
    small.worker.step()
    assert small.worker.load is before
    small.submit(2, PROMPTS[17], SAMPLED, StoppingParams(max_tokens=5))
    small.worker.step()
    assert small.worker.load.num_running == 2
    while 2 in small.inbox.session.groups:
        small.worker.step()
    assert small.worker.load.num_running == 1
    monkeypatch.setattr(worker, "LOAD_S", 0.0)
    before = small.worker.load
    small.worker.step()
    assert small.worker.load is not before
    small.run()
    assert small.worker.load.num_running == 0


def test_a_ticket_that_was_issued_to_somebody_else_is_lost_here_and_good_there(small: DecodeBench) -> None:
    """A session that guesses the epoch (a sequential number) gets nothing. The intended session continues."""
    made = small.prefilled(1, PROMPTS[17], GREEDY, STOPPING)
    guessed = replace(made.ticket, id=TicketId(made.ticket.id.epoch, bytes(16)))
    thief = small.prefilled(2, PROMPTS[17], GREEDY, STOPPING)
    small.worker.submit(small.inbox.session, *thief._replace(ticket=guessed))
    assert small.inbox.rejections == {2: Rejection.LOST}
    small.worker.submit(small.inbox.session, *made)
    small.run()
    assert len(small.inbox.ids(1)[0]) == STOPPING.max_tokens
    small.prefill.decline(thief.ticket)
