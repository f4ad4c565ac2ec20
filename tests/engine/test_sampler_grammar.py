"""The sampler with grammars: sampled tokens, changed mask bits, log-probabilities, combination with other
parameters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

from common.grammar import compile_grammar, load_tokenizer
from common.types import SamplingParams, StoppingParams, StructuredOutput
from engine.grammar_state import GrammarState
from engine.sampler import SampleRow, adjust, sample_rows
from engine.sequence import Sequence
from engine.step_sampler import Sampler

VOCAB = 2048
GREEDY = SamplingParams(temperature=0.0, logprobs=3)
DRAWN = SamplingParams(temperature=1.0, seed=5, top_p=0.9, logprobs=3)
STOPPING = StoppingParams(max_tokens=30, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_tokenizer(Path(__file__).parents[2] / "models/storyteller", VOCAB)


def state(tokenizer: LLTokenizer, pattern: str) -> GrammarState:
    return GrammarState(compile_grammar(tokenizer, StructuredOutput("regex", pattern)), tokenizer, STOPPING)


def row(
    params: SamplingParams, grammar: GrammarState | None, output: list[int] | None = None, sample: int = 0
) -> SampleRow:
    output = output or []
    return SampleRow(params, STOPPING, [5, 6], output, sample, len(output), grammar)


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(1)) * 4


def digits(tokenizer: LLTokenizer) -> list[int]:
    mask = state(tokenizer, "[0-9]+").mask([])
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def test_greedy_takes_the_most_likely_token_that_is_allowed(tokenizer: LLTokenizer) -> None:
    logits = random_logits(1)
    [drawn] = sample_rows(logits, [row(GREEDY, state(tokenizer, "[0-9]+"))])
    assert drawn.token_id == max(digits(tokenizer), key=lambda token: float(logits[0, token]))


@pytest.mark.parametrize("places", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_rows_without_a_grammar_keep_their_bits(tokenizer: LLTokenizer, places: tuple[int, ...]) -> None:
    logits = random_logits(4)
    before = logits.clone()
    rows = [row(DRAWN, state(tokenizer, "[0-9]+") if i in places else None, sample=i) for i in range(4)]
    adjusted = adjust(logits, list(enumerate(rows)))
    assert torch.equal(logits, before)
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[digits(tokenizer)] = True
    for i in range(4):
        if i in places:
            assert torch.equal(adjusted[i][allowed], logits[i][allowed])
            assert adjusted[i][~allowed].eq(-torch.inf).all()
        else:
            assert torch.equal(adjusted[i], logits[i])


def test_a_row_does_not_depend_on_its_neighbours(tokenizer: LLTokenizer) -> None:
    logits = random_logits(6)
    rows = [row((GREEDY, DRAWN)[i % 2], state(tokenizer, "[0-9a-f]+") if i % 3 else None, sample=i) for i in range(6)]
    together = sample_rows(logits, rows)
    alone = [sample_rows(logits[i : i + 1], [rows[i]])[0] for i in range(6)]
    assert together == alone


def test_many_draws_are_allowed_ones_and_differ(tokenizer: LLTokenizer) -> None:
    logits, shared = random_logits(1).repeat(64, 1), state(tokenizer, "[0-9]+")
    drawn = sample_rows(logits, [row(replace(DRAWN, top_p=1.0), shared, sample=i) for i in range(64)])
    ids = {sampled.token_id for sampled in drawn}
    assert ids <= set(digits(tokenizer)) and len(ids) > 3


def test_log_probabilities_are_those_of_the_raw_logits(tokenizer: LLTokenizer) -> None:
    logits = random_logits(1)
    [drawn] = sample_rows(logits, [row(GREEDY, state(tokenizer, "[0-9]+"))])
    expected = torch.log_softmax(logits[0].double(), -1)
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(float(expected[drawn.token_id]), abs=1e-5)
    assert [token for token, _ in drawn.logprob.top] == torch.topk(logits[0], 3).indices.tolist()


def test_bias_and_penalties_choose_among_what_is_allowed(tokenizer: LLTokenizer) -> None:
    logits, allowed = random_logits(1), digits(tokenizer)
    banned = next(token for token in range(100, VOCAB) if token not in allowed)
    biased = replace(GREEDY, logit_bias=((banned, 100.0), (allowed[0], 99.0)))
    [drawn] = sample_rows(logits, [row(biased, state(tokenizer, "[0-9]+"))])
    assert drawn.token_id == allowed[0]
    penalised = replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=10.0)
    output = tokenizer.tokenize_str("1")
    [drawn] = sample_rows(logits, [row(penalised, state(tokenizer, "[0-9]+"), output)])
    assert drawn.token_id in [*allowed, 2]


def test_a_batch_that_runs_on_draws_what_single_rows_draw(tokenizer: LLTokenizer) -> None:
    """Compares `Sampler`, which keeps its columns, with `sample_rows` and new states in each step."""
    pattern, sampler = "[a-z]{3,8}-[0-9]{2,9}", Sampler()
    sequences = [Sequence([5, 6], [], DRAWN if i % 2 else GREEDY, STOPPING, i) for i in range(4)]
    for sequence in sequences[:3]:
        sequence.grammar = state(tokenizer, pattern)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        logits = torch.randn((len(sequences), VOCAB), generator=generator) * 4
        fresh = [
            row(s.sampling, state(tokenizer, pattern) if s.grammar else None, s.output_ids, s.sample_index)
            for s in sequences
        ]
        expected = sample_rows(logits, fresh)
        assert sampler.draw(logits, sequences) == expected
        for sequence, sampled in zip(sequences, expected, strict=True):
            sequence.output_ids.append(sampled.token_id)
        sequences = [s for s in sequences if s.finish_reason(1000) is None]
    assert len(sequences) < 4


def test_a_fork_draws_by_its_own_tokens(tokenizer: LLTokenizer) -> None:
    parent = Sequence([5, 6], [], GREEDY, STOPPING)
    parent.grammar = state(tokenizer, "a1|b2")
    fork = parent.fork(1)
    parent.output_ids += tokenizer.tokenize_str("a")
    fork.output_ids += tokenizer.tokenize_str("b")
    drawn = sample_rows(random_logits(2), [SampleRow.of(parent), SampleRow.of(fork)])
    assert tokenizer.decode_str([sampled.token_id for sampled in drawn]) == "12"
