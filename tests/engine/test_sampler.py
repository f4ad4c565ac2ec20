"""The sampler: penalties, bias and minimum length compared with a simple loop, log-probabilities, independence of the
batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.types import SamplingParams, StoppingParams
from engine.sampler import SampleRow, adjust, banned_next, prompt_logprobs, sample_rows
from engine.sequence import Sequence
from engine.step_sampler import Sampler

VOCAB = 97
GREEDY = SamplingParams(temperature=0.0)


def row(params: SamplingParams = GREEDY, prompt: list[int] | None = None, output: list[int] | None = None,
        *, sample_index: int = 0, min_tokens: int = 0, stop: tuple[int, ...] = ()) -> SampleRow:  # fmt: skip
    output = output or []
    stopping = StoppingParams(min_tokens=min_tokens, stop_token_ids=stop)
    return SampleRow(params, stopping, prompt or [1], output, sample_index, len(output))


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


def plain_adjust(logits: list[float], r: SampleRow) -> list[float]:
    """Returns adjusted logits, computed in vLLM's order, one token at a time."""
    out = list(logits)
    for token, bias in r.params.logit_bias:
        out[token] += bias
    if len(r.output_ids) < r.stopping.min_tokens:
        for token in r.stopping.stop_token_ids:
            out[token] = -math.inf
    for token in range(len(out)):
        count = list(r.output_ids).count(token)
        if count or token in r.prompt_ids:
            p = r.params.repetition_penalty
            out[token] = out[token] / p if out[token] > 0 else out[token] * p
        out[token] -= r.params.frequency_penalty * count + r.params.presence_penalty * (count > 0)
    return out


def mixed_rows() -> list[SampleRow]:
    rng = np.random.default_rng(0)

    def ids(n: int) -> list[int]:
        return rng.integers(0, VOCAB, n).tolist()

    p = SamplingParams(temperature=0.7, seed=3)
    return [
        row(GREEDY, ids(30), ids(9)),
        row(replace(p, repetition_penalty=1.3), ids(30), ids(40)),
        row(replace(p, frequency_penalty=0.4), ids(30), ids(40)),
        row(replace(p, presence_penalty=-0.7), ids(30), []),
        row(replace(p, repetition_penalty=0.8, frequency_penalty=-0.2, presence_penalty=1.5, top_k=5), ids(7), ids(60)),
        row(replace(p, logit_bias=((3, 5.0), (90, -100.0))), ids(3), ids(3), min_tokens=4, stop=(2, 5)),
        row(replace(p, logit_bias=((3, 5.0),), repetition_penalty=2.0), [3], [3, 3], min_tokens=2, stop=(2,)),
    ]


def test_penalties_bias_and_min_tokens_are_vllms() -> None:
    rows = mixed_rows()
    logits = random_logits(len(rows))
    kept = logits.clone()
    got = adjust(logits, list(enumerate(rows)))
    want = torch.tensor([plain_adjust(values, r) for values, r in zip(logits.tolist(), rows, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, kept), "the caller's logits were changed"


def test_rows_do_not_depend_on_the_batch() -> None:
    rows = [replace_logprobs(r, k) for r, k in zip(mixed_rows(), (0, 3, None, 5, 1, 2, None), strict=True)]
    logits = random_logits(len(rows))
    together = sample_rows(logits, rows)
    alone = [sample_rows(logits[i : i + 1].clone(), [r])[0] for i, r in enumerate(rows)]
    assert together == alone
    order = [4, 2, 6, 0]
    assert sample_rows(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_a_sampler_draws_step_after_step_what_rows_alone_draw() -> None:
    """The prepared columns change when a sequence joins, leaves or reaches its min_tokens."""
    seeds = ((1 << 63) - 1, -1, -(1 << 63))
    rows = [*mixed_rows(), *(row(SamplingParams(seed=seed, logprobs=2), [5], [6], sample_index=3) for seed in seeds)]
    sequences = [Sequence(list(r.prompt_ids), list(r.output_ids), r.params, r.stopping, r.sample_index) for r in rows]
    drawer, batches = Sampler(), [sequences, sequences, sequences, sequences[2:], sequences[::-1], sequences[:1]]
    for step, batch in enumerate(batches):
        logits = random_logits(len(batch), step)
        found = drawer.draw(logits, batch)
        assert found == sample_rows(logits, [SampleRow.of(s) for s in batch])
        for sequence, sampled in zip(batch, found, strict=True):
            assert (sampled.logprob is None) == (sequence.sampling.logprobs is None)
            sequence.output_ids.append(sampled.token_id)


def test_a_token_outside_the_vocabulary_does_not_reach_the_next_row() -> None:
    for params in (replace(GREEDY, logit_bias=((VOCAB, 1.0),)), replace(GREEDY, presence_penalty=1.0)):
        with pytest.raises(IndexError, match="below the vocabulary's size, 97"):
            sample_rows(random_logits(2), [row(params, output=[VOCAB]), row()])


def replace_logprobs(r: SampleRow, k: int | None) -> SampleRow:
    return replace(r, params=replace(r.params, logprobs=k))


def test_min_tokens_holds_stop_tokens_back_until_it_is_reached() -> None:
    logits = torch.zeros((1, VOCAB))
    logits[0, 2] = 50.0
    assert sample_rows(logits, [row(output=[9], min_tokens=2, stop=(2,))])[0].token_id != 2
    assert sample_rows(logits, [row(output=[9, 9], min_tokens=2, stop=(2,))])[0].token_id == 2


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros((2, VOCAB))
    logits[0, [7, 30]] = 2.0
    assert [s.token_id for s in sample_rows(logits, [row(), row()])] == [7, 0]


def test_seed_sample_and_position_each_change_the_draw() -> None:
    flat, hot = torch.zeros((1, VOCAB)), SamplingParams(temperature=1.0, seed=11)

    def draws(**changes: int) -> list[int]:
        params = replace(hot, seed=changes.get("seed", 11))
        rows = [row(params, output=[0] * n, sample_index=changes.get("sample", 0)) for n in range(20)]
        return [s.token_id for s in sample_rows(flat.expand(20, -1).contiguous(), rows)]

    assert draws() == draws() and len(set(draws())) > 8
    assert draws() != draws(seed=12) and draws() != draws(sample=1)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(1, seed=5)
    params = SamplingParams(temperature=0.1, seed=1, repetition_penalty=2.0, logprobs=4)
    sampled = sample_rows(logits, [row(params, output=[4, 5])])[0]
    want = logits[0].double().log_softmax(-1)
    assert sampled.logprob is not None
    assert math.isclose(sampled.logprob.logprob, want[sampled.token_id], abs_tol=1e-5)
    assert sampled.logprob.rank == int((want > want[sampled.token_id]).sum()) + 1
    assert [i for i, _ in sampled.logprob.top] == want.topk(4).indices.tolist()
    assert sample_rows(logits, [row()])[0].logprob is None


def test_prompt_logprobs_have_one_entry_per_target() -> None:
    logits, targets = random_logits(6), [4, 8, 0, 96, 8, 8]
    got = prompt_logprobs(logits, targets, 2)
    want = logits.double().log_softmax(-1)
    assert [e.token_id for e in got] == targets
    for i, entry in enumerate(got):
        assert math.isclose(entry.logprob, want[i, targets[i]], abs_tol=1e-5)
        assert [t for t, _ in entry.top] == want[i].topk(2).indices.tolist()
    assert prompt_logprobs(logits[:0], [], 2) == []
    assert [e.top for e in prompt_logprobs(logits[:1], [4], 0)] == [()]


def test_bad_words_ban_only_the_token_that_would_complete_them() -> None:
    bad = ((4,), (5, 6), (7, 8, 9))
    assert banned_next(bad, []) == [4]
    assert banned_next(bad, [5]) == [4, 6] and banned_next(bad, [5, 5]) == [4, 6] and banned_next(bad, [6]) == [4]
    assert banned_next(bad, [1, 7, 8]) == [4, 9] and banned_next(bad, [8]) == [4]


def test_bans_change_only_their_own_rows() -> None:
    logits = torch.randn((3, 40), generator=torch.Generator().manual_seed(3))
    stopping = StoppingParams(max_tokens=9)
    free = SampleRow(SamplingParams(temperature=0.0), stopping, [5], [1, 7], 0, 2)
    best = int(logits[1].argmax())
    bad = SampleRow(SamplingParams(temperature=0.0, bad_token_ids=((7, best),)), stopping, [5], [1, 7], 0, 2)
    few = SampleRow(SamplingParams(temperature=0.0, allowed_token_ids=(3, 11, 12)), stopping, [5], [1, 7], 0, 2)
    drawn = [sampled.token_id for sampled in sample_rows(logits, [free, bad, few])]
    second = int(logits[1].topk(2).indices[1])
    assert drawn == [int(logits[0].argmax()), second, max((3, 11, 12), key=lambda token: logits[2, token])]
