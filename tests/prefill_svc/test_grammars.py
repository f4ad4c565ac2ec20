"""Prefill with grammars: the first token is constrained; a grammar that fails affects only its own prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from common.errors import InvalidArgument
from common.grammar import compile_grammar, load_tokenizer
from common.types import Branch, FinishReason, SamplingParams, StoppingParams, StructuredOutput
from engine import grammar_state
from engine.grammar_state import GrammarState
from engine.tiny import write_tokenizer
from prefill_svc.events import Done
from prefill_svc.job import Job

STOPPING = StoppingParams(max_tokens=20, stop_token_ids=(2,))
PROMPT = list(range(10, 50))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory, 512)


def job_of(tokenizer: LLTokenizer, pattern: str, num_samples: int = 1, output: tuple[int, ...] = ()) -> Job:
    wanted = StructuredOutput("regex", pattern)
    sampling = SamplingParams(temperature=1.0, seed=3, num_sequences=num_samples, structured=wanted)
    job = Job.of(PROMPT, [Branch(index, output) for index in range(num_samples)], sampling, STOPPING)
    start: LLMatcher = compile_grammar(tokenizer, wanted)
    for sequence in job.sequences:
        sequence.grammar = GrammarState(start.deep_copy(), tokenizer, STOPPING)
    return job


def run(world: Any, *jobs: Job) -> list[Any]:
    events: list[list[Any]] = [[] for _ in jobs]
    for job, heard in zip(jobs, events, strict=True):
        world.worker.submit(job, b"", heard.append)
    world.run(*events)
    for heard in events:
        if isinstance(heard[-1], Done) and heard[-1].ticket is not None:
            world.claimer.release(world.claim(heard[-1].ticket))
    return [heard[-1] for heard in events]


@pytest.mark.parametrize("budget", [16, 512])
def test_the_first_token_of_every_sample_is_constrained(
    make_world: Callable[..., Any], tokenizer: LLTokenizer, budget: int
) -> None:
    [done] = run(make_world(budget=budget), job_of(tokenizer, "[0-9]{3}", 12))
    texts = [tokenizer.decode_str([token.token_id]) for token in done.tokens]
    assert all(text.isdigit() for text in texts) and len(set(texts)) > 2


def test_a_sample_whose_grammar_ends_with_its_first_token_is_over(
    make_world: Callable[..., Any], tokenizer: LLTokenizer
) -> None:
    [done] = run(make_world(), job_of(tokenizer, "x|yz", 12))
    reasons = {tokenizer.decode_str([t.token_id]): t.finish_reason for t in done.tokens}
    assert reasons["x"] is FinishReason.STOP and reasons[next(text for text in reasons if text != "x")] is None
    assert len(done.ticket.tables) == sum(token.finish_reason is None for token in done.tokens)


def test_a_sample_that_comes_back_goes_on_in_its_grammar(
    make_world: Callable[..., Any], tokenizer: LLTokenizer
) -> None:
    [done] = run(make_world(), job_of(tokenizer, "ab[0-9]+", 1, tuple(tokenizer.tokenize_str("ab"))))
    assert tokenizer.decode_str([done.tokens[0].token_id]).isdigit()


def test_a_grammar_that_takes_too_long_costs_only_its_prompt(
    make_world: Callable[..., Any], tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Job.of(PROMPT, [Branch()], SamplingParams(temperature=0.0), STOPPING)
    slow = job_of(tokenizer, "[a-z]+", 3)
    monkeypatch.setattr(grammar_state, "MAX_MASK_CPU_S", 0.0)
    done, error = run(make_world(), free, slow)
    assert isinstance(done, Done) and isinstance(error, InvalidArgument)
    assert error.violations[0].field == "structured_output"
