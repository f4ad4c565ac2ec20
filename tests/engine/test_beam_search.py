"""Beam search: worked examples, comparison with an exhaustive implementation, limits, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import EarlyStopping, FinishReason, SamplingParams, StoppingParams, TokenLogprob
from engine.beam_search import BeamSearch, Candidates, Hypothesis
from engine.sampler import SampleRow, beam_candidates

A, B, C, D, E = range(5)


def search(width: int, max_tokens: int, stop: tuple[int, ...] = (), **sampling: object) -> BeamSearch:
    params = SamplingParams(num_sequences=width, beam_width=width, **sampling)  # type: ignore[arg-type]
    return BeamSearch(params, StoppingParams(max_tokens, stop_token_ids=stop), 3, 100)


def ranked(logprobs: Seq[float], count: int) -> Candidates:
    """Returns the `count` most likely tokens of a row in the sampler's format."""
    order = np.argsort(-np.array(logprobs, np.float32), kind="stable")[:count].tolist()
    return Candidates(order, [float(np.float32(logprobs[i])) for i in order])


def of_probabilities(*probabilities: float) -> Candidates:
    return ranked([math.log(p) for p in probabilities], len(probabilities))


def test_the_two_step_search_that_keeps_abd_and_ced() -> None:
    """With a vocabulary of A to E and width 2, the beams are A and C, then AB and CE, then ABD and CED."""
    beams = search(2, 3)
    assert beams.advance([of_probabilities(0.5, 0.05, 0.4, 0.03, 0.02)]) == [0, 0]
    assert [beam.token_ids for beam in beams.running] == [[A], [C]]
    after_a, after_c = of_probabilities(0.1, 0.6, 0.1, 0.1, 0.1), of_probabilities(0.1, 0.1, 0.05, 0.05, 0.7)
    assert beams.advance([after_a, after_c]) == [0, 1]
    assert [beam.token_ids for beam in beams.running] == [[A, B], [C, E]]
    after_ab, after_ce = of_probabilities(0.15, 0.1, 0.1, 0.6, 0.05), of_probabilities(0.1, 0.1, 0.1, 0.5, 0.2)
    assert beams.advance([after_ab, after_ce]) == [] and beams.done
    assert [found.token_ids for found in beams.best()] == [[A, B, D], [C, E, D]]
    assert [found.score for found in beams.best()] == pytest.approx(
        [math.log(0.5 * 0.6 * 0.6) / 3, math.log(0.4 * 0.7 * 0.5) / 3], rel=1e-6
    )
    assert {found.finish_reason for found in beams.best()} == {FinishReason.LENGTH}


def test_a_step_of_width_four_in_which_the_outer_candidates_drop_out() -> None:
    """Beams 0 and 3 have no continuation among the best four; 1 and 2 are forked."""
    beams = search(4, 8)
    assert beams.advance([of_probabilities(0.26, 0.25, 0.25, 0.24)]) == [0, 0, 0, 0]
    flat, sharp = of_probabilities(*[0.1] * 10), of_probabilities(0.5, 0.45, *[0.00625] * 8)
    assert beams.advance([flat, sharp, sharp, flat]) == [1, 2, 1, 2]
    assert [beam.token_ids for beam in beams.running] == [[1, 0], [2, 0], [1, 1], [2, 1]]


# --- a second implementation, with whole rows and arrays with placeholders

NOTHING = np.float32(-1e9)


def row_after(seed: int, token_ids: Seq[int], vocab_size: int) -> list[float]:
    """Returns arbitrary log-probabilities after these tokens. They are multiples of 1/8, so sums are exact and ties
    frequent."""
    values: list[float] = (np.random.default_rng([seed, *token_ids]).integers(-40, 1, vocab_size) / 8).tolist()
    return values


def exhaustive(
    sampling: SamplingParams, max_tokens: int, stop: tuple[int, ...], seed: int, vocab_size: int
) -> list[tuple[list[int], float]]:
    """Searches by considering every (beam, token) in every step. There are always `width` running and `width` ended
    beams.
    """
    width, power = sampling.width, sampling.length_penalty
    kept = max(2, 1 + len(stop)) * width
    running, sums = [list[int]()] * width, np.array([0.0] + [NOTHING] * (width - 1), np.float32)
    ended, scores, is_real = [list[int]()] * width, np.full(width, NOTHING), np.zeros(width, bool)
    for length in range(1, max_tokens + 1):
        rows = np.array([row_after(seed, ids, vocab_size) for ids in running], np.float32)
        totals = (rows + sums[:, None]).reshape(-1)
        best = np.argsort(-totals, kind="stable")[:kept]
        sequences = [[*running[i // vocab_size], int(i % vocab_size)] for i in best]
        hits = np.array([ids[-1] in stop or length == max_tokens for ids in sequences])
        new = hits & (np.arange(kept) < width)
        all_scores = np.concatenate((scores, np.where(new, totals[best] / np.float32(length**power), NOTHING)))
        order = np.argsort(-all_scores, kind="stable")[:width]
        pool, reality = ended + sequences, np.concatenate((is_real, new))
        ended, scores, is_real = [pool[i] for i in order], all_scores[order], reality[order]
        order = np.argsort(-np.where(hits, NOTHING, totals[best]), kind="stable")[:width]
        running, sums = [sequences[i] for i in order], np.where(hits, NOTHING, totals[best])[order]
        furthest = max_tokens if sampling.early_stopping == "never" and power > 0 else length
        improvable = not is_real.all() or sums[0] / np.float32(furthest**power) > scores.min()
        if not improvable or hits.all() or (is_real.all() and sampling.early_stopping is True):
            break
    assert is_real.all()
    return list(zip(ended, scores.tolist(), strict=True))[: sampling.num_sequences]


def run(beams: BeamSearch, seed: int, vocab_size: int) -> list[Hypothesis]:
    while not beams.done:
        old = beams.running
        rows = [row_after(seed, beam.token_ids, vocab_size) for beam in old]
        parents = beams.advance([ranked(row, beams.num_candidates) for row in rows])
        for parent, beam in zip(parents, beams.running, strict=True):
            assert beam.token_ids[:-1] == old[parent].token_ids
    return beams.best()


@given(
    width=st.integers(1, 5),
    returned=st.integers(1, 5),
    num_stops=st.integers(0, 3),
    max_tokens=st.integers(1, 9),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_equals_an_exhaustive_search(
    width: int, returned: int, num_stops: int, max_tokens: int,
    length_penalty: float, early_stopping: EarlyStopping, seed: int,
) -> None:  # fmt: skip
    sampling = SamplingParams(
        num_sequences=min(returned, width),
        beam_width=width,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    stop = tuple(range(3, 3 + 2 * num_stops, 2))
    beams = BeamSearch(sampling, StoppingParams(max_tokens, stop_token_ids=stop), 3, 100)
    got = [(found.token_ids, found.score) for found in run(beams, seed, 20)]
    assert got == exhaustive(sampling, max_tokens, stop, seed, 20)


def test_early_stopping_by_each_rule() -> None:
    """One beam has ended. The running beam has a lower score per token now, but would have a higher score at the length
    limit.
    """
    ends: dict[EarlyStopping, bool] = {True: True, False: True, "never": False}
    for rule, ended in ends.items():
        beams = search(1, 50, stop=(A,), early_stopping=rule)
        beams.advance([of_probabilities(0.6, 0.4)])
        assert beams.done is ended, rule
        assert beams.best()[0].token_ids == [A]
    beams = search(1, 50, stop=(A,), length_penalty=0.0, early_stopping="never")
    beams.advance([of_probabilities(0.6, 0.4)])
    assert beams.done, "no length makes up for a lower sum if length does not count"
    beams = search(2, 50, stop=(A,), early_stopping=False)
    beams.advance([of_probabilities(0.6, 0.3, 0.1)])
    assert not beams.done, "one ended beam is not two"


@pytest.mark.parametrize("max_tokens,max_model_len,length", [(5, 100, 5), (50, 9, 6), (1, 100, 1)])
def test_ends_at_the_first_of_two_limits(max_tokens: int, max_model_len: int, length: int) -> None:
    sampling = SamplingParams(num_sequences=3, beam_width=4)
    beams = BeamSearch(sampling, StoppingParams(max_tokens), 3, max_model_len)
    found = run(beams, 1, 20)
    assert [len(hypothesis.token_ids) for hypothesis in found] == [length] * 3
    assert beams.running == []


def test_a_stop_token_ends_no_beam_before_min_tokens() -> None:
    stopping = StoppingParams(8, min_tokens=2, stop_token_ids=(A,))
    beams = BeamSearch(SamplingParams(beam_width=1), stopping, 3, 100)
    beams.advance([of_probabilities(0.9, 0.1)])
    assert beams.running[0].token_ids == [A] and not beams.best()
    beams.advance([of_probabilities(0.9, 0.1)])
    assert beams.best()[0].token_ids == [A, A] and beams.best()[0].finish_reason is FinishReason.STOP


def test_a_vocabulary_smaller_than_the_width_fills_up_with_the_next_step() -> None:
    beams = search(4, 3)
    assert beams.advance([of_probabilities(0.5, 0.5)]) == [0, 0]
    assert beams.advance([of_probabilities(0.5, 0.5)] * 2) == [0, 0, 1, 1]
    assert len(run(beams, 0, 2)) == 4


def test_logprobs_of_the_tokens_chosen_and_of_the_most_likely() -> None:
    beams = search(2, 2, logprobs=3)
    first, second = of_probabilities(0.2, 0.4, 0.3, 0.1), of_probabilities(0.25, 0.25, 0.4, 0.1)
    beams.advance([first])
    beams.advance([second, second])
    top = tuple(zip(second.token_ids, second.logprobs, strict=True))[:3]
    assert beams.best()[0].logprobs == [
        TokenLogprob(1, first.logprobs[0], 1, tuple(zip(first.token_ids, first.logprobs, strict=True))[:3]),
        TokenLogprob(2, second.logprobs[0], 1, top),
    ]
    assert [entry.token_id for entry in beams.best()[1].logprobs] == beams.best()[1].token_ids
    assert search(2, 2, logprobs=9).num_candidates == 9 and search(2, 2).num_candidates == 4


def test_equal_logprobs_share_a_rank() -> None:
    beams = search(2, 1, logprobs=0)
    beams.advance([of_probabilities(0.4, 0.4, 0.2)])
    assert [found.logprobs[0].rank for found in beams.best()] == [1, 1]
    assert beams.best()[0].logprobs[0].top == ()


def test_candidates_are_ranked_after_bias_penalties_and_min_tokens() -> None:
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(0))
    plain = SamplingParams(temperature=0.0)
    biased = replace(plain, logit_bias=((7, 4.0),), presence_penalty=1.5)
    rows = [
        SampleRow(plain, StoppingParams(), [1], [], 0, 0),
        SampleRow(biased, StoppingParams(min_tokens=2, stop_token_ids=(9, 8)), [1], [3], 0, 1),
        SampleRow(plain, StoppingParams(), [1], [], 0, 0),
    ]
    found = beam_candidates(logits, rows, [4, 60, 1])
    assert [len(c.token_ids) for c in found] == [4, 50, 1]
    changed = logits[1].clone()
    changed[7] += 4.0
    changed[[9, 8]] = -math.inf
    changed[3] -= 1.5
    for got, want in zip(found, (logits[0], changed, logits[2]), strict=True):
        logprobs = want.double().log_softmax(-1)
        order = logprobs.sort(descending=True, stable=True).indices[: len(got.token_ids)]
        assert list(got.token_ids) == order.tolist()
        assert np.allclose(got.logprobs, logprobs[order], atol=1e-5)
    alone = beam_candidates(logits[1:2].clone(), rows[1:2], [60])
    assert alone == found[1:2], "a row depends on its company"
    assert beam_candidates(logits[:0], [], []) == []
