"""Beam search on decode: beams fork and end within a step, share blocks, and are those of the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.types import BlockRef, SamplingParams, StoppingParams
from decode_svc import sampling_step
from decode_svc.outputs import Outbox, Session
from decode_svc.running_blocks import RunningBlocks
from decode_svc.sampling_step import SamplingStep
from decode_svc.scheduler import Group
from engine.beam_search import Beam, BeamSearch, Candidates
from engine.block_table import BlockTable
from engine.sequence import Sequence
from kernels.sampling import RepeatedSample
from testing.decode import DecodeBench
from testing.oracle import Oracle

STOPS = tuple(range(5, 500, 20))
STOPPING = StoppingParams(max_tokens=20, stop_token_ids=STOPS)
PROMPTS = {length: np.random.default_rng(length).integers(5, 500, length).tolist() for length in (1, 15, 16, 17, 33)}


def beams(width: int, **others: Any) -> SamplingParams:
    return SamplingParams(num_sequences=width, beam_width=width, **others)


def assert_as_alone(
    bench: DecodeBench, handle: int, prompt: list[int], sampling: SamplingParams, stopping: StoppingParams
) -> None:
    expected = Oracle(bench.runner).beam_search(prompt, sampling, stopping)
    heard = [answer for _, answer in sorted(bench.inbox.answers[handle].items())]
    assert [answer.token_ids for answer in heard] == [beam.token_ids for beam in expected]
    assert [answer.beam_score for answer in heard] == pytest.approx([beam.score for beam in expected], abs=1e-5)
    assert [answer.finish_reason for answer in heard] == [beam.finish_reason for beam in expected]
    for answer, beam in zip(heard, expected, strict=True):
        found, wanted = answer.logprobs, beam.logprobs
        assert [p.token_id for p in found] == [p.token_id for p in wanted]
        assert [p.logprob for p in found] == pytest.approx([p.logprob for p in wanted], abs=1e-5)


@pytest.mark.parametrize("length", PROMPTS)
def test_the_best_beams_are_the_oracles(ordinary: DecodeBench, length: int) -> None:
    asked = [beams(2), beams(4, length_penalty=2.0), replace(beams(4, early_stopping=True), num_sequences=2)]
    for handle, sampling in enumerate(asked):
        ordinary.submit(handle, PROMPTS[length], sampling, STOPPING)
    ordinary.run()
    for handle, sampling in enumerate(asked):
        assert_as_alone(ordinary, handle, PROMPTS[length], sampling, STOPPING)


def test_a_search_speaks_once_and_lets_go(small: DecodeBench) -> None:
    sampling = beams(4, logprobs=3)
    group = small.submit(1, PROMPTS[17], sampling, StoppingParams(max_tokens=12))
    assert len(group.live) == 4 and len({s.output_ids[0] for s in group.live}) == 4
    for _ in range(5):
        small.worker.step()
    small.worker.cancel(small.inbox.session, 1, 0)  # a single beam cannot be cancelled
    assert not small.inbox.answers[1] and small.worker.load.num_running == 4
    assert small.held.num_held < 4 * len(group.live[0].table)
    small.run()
    assert len(small.inbox.answers[1]) == 4 and small.held.num_held == 0
    assert_as_alone(small, 1, PROMPTS[17], sampling, StoppingParams(max_tokens=12))


def test_a_search_of_one_token_ends_with_its_claim(small: DecodeBench) -> None:
    small.submit(1, PROMPTS[15], beams(4), StoppingParams(max_tokens=1))
    assert len(small.inbox.answers[1]) == 4 and small.held.num_held == 0
    assert small.worker.step() is None
    assert_as_alone(small, 1, PROMPTS[15], beams(4), StoppingParams(max_tokens=1))


def test_a_cancelled_search_lets_go(small: DecodeBench) -> None:
    small.submit(1, PROMPTS[33], beams(4), STOPPING)
    small.worker.step()
    small.worker.cancel(small.inbox.session, 1)
    assert small.held.num_held == 0 and small.worker.step() is None and not small.inbox.answers[1]


def test_a_skipped_copy_shows(small: DecodeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []

    def skip(_: list[int], targets: list[int]) -> None:
        copies.append(len(targets))
        small.arena.data[targets] = 0

    monkeypatch.setattr(small.runner, "copy_blocks", skip)
    small.submit(1, PROMPTS[17], beams(4), STOPPING)
    small.run()
    monkeypatch.undo()
    assert len(copies) > 2
    with pytest.raises(AssertionError):
        assert_as_alone(small, 1, PROMPTS[17], beams(4), STOPPING)


def test_all_kinds_go_in_one_pass_and_one_draw(small: DecodeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for owner, name in ((small.runner, "step"), (RepeatedSample, "draw"), (sampling_step, "beam_candidates")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, call=call, name=name: calls.append(name) or call(*args))
    asked: list[tuple[int, SamplingParams, StoppingParams]] = [
        (1, SamplingParams(temperature=0.0), StoppingParams(max_tokens=12)),
        (33, beams(4, logprobs=2), StoppingParams(max_tokens=17)),
        (17, SamplingParams(seed=3, num_sequences=3, logprobs=2), StoppingParams(max_tokens=15)),
        (15, SamplingParams(seed=4, top_k=9, presence_penalty=1.0), StoppingParams(max_tokens=16, min_tokens=4)),
        (16, beams(2, repetition_penalty=1.3), StoppingParams(max_tokens=14, min_tokens=3, stop_token_ids=STOPS)),
    ]
    for handle, (length, sampling, stopping) in enumerate(asked):
        small.submit(handle, PROMPTS[length], sampling, stopping)
    calls.clear()
    small.worker.step()
    assert calls == ["step", "draw", "beam_candidates"]
    small.run()
    monkeypatch.undo()
    for handle, (length, sampling, stopping) in enumerate(asked):
        if sampling.beam_width is not None:
            assert_as_alone(small, handle, PROMPTS[length], sampling, stopping)
            continue
        for index in range(sampling.num_sequences):
            drawn = Oracle(small.runner).draw(PROMPTS[length], sampling, stopping, sample_index=index)
            answer = small.inbox.answers[handle][index]
            assert answer.token_ids == [sample.token_id for sample in drawn]
            wanted = [sample.logprob.logprob for sample in drawn if sample.logprob]
            assert [p.logprob for p in answer.logprobs] == pytest.approx(wanted, abs=1e-5)


def test_the_step_of_figure_9(small: DecodeBench) -> None:
    """Figure 9 of PagedAttention (Kwon et al., 2023): of four candidates with four full blocks each, 0 and 3 drop out.
    Blocks 2, 4, 5, 8 are freed; all candidates share 0, 1, 3, two share 6 and two share 7; four new blocks are
    allocated.
    """
    held = small.held
    block: list[BlockRef] = held.alloc(9)
    tables = [(0, 1, 3, 5), (0, 1, 3, 6), (0, 1, 3, 7), (0, 2, 4, 8)]
    for number in range(9):
        held.share([block[number]] * (sum(number in table for table in tables) - 1))
    sampling, stopping = beams(4), StoppingParams(max_tokens=32)
    live = [
        Sequence(PROMPTS[1] * 3, [7] * 14, sampling, stopping, table=BlockTable(block[number] for number in table))
        for table in tables
    ]
    for sequence in live:
        sequence.num_computed, sequence.num_sealed = 16, 4
    group = Group(1, 0, live, live=live)
    group.search = search = BeamSearch(sampling, stopping, 3, 256)
    search.running = [Beam([7] * 14, -1.0)] * 4
    unlikely, likely = (Candidates(range(8), [level - i for i in range(8)]) for level in (-50.0, -1.0))

    blocks, outbox = RunningBlocks(small.runner, small.worker._attached), Outbox()
    outbox.open(Session(lambda *_: None), group)
    SamplingStep(blocks, outbox, 256, outbox.close).advance(group, search, [unlikely, likely, likely, unlikely])

    assert [list(s.table) for s in group.live] == [[block[n] for n in tables[parent]] for parent in (1, 2, 1, 2)]
    assert [held.count(ref) for ref in block] == [4, 4, 0, 4, 0, 0, 2, 2, 0]
    assert blocks.writes.needing_block(group.live) == group.live
    fresh = held.alloc(4)
    for sequence, ref in zip(group.live, fresh, strict=True):
        blocks.writes.give(sequence, [ref])
    assert held.num_held == 5 + 4 and not any(s.copy_from for s in group.live)
    blocks.release(group.live)
