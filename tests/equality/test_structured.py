"""Structured output, bad words and allowed tokens. On every path, answers are those of the oracle, which starts over
for each token. Constrained and free requests run together: greedy, sampled, n = 4, with penalties and
log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from common.errors import InvalidArgument
from common.grammar import eos_token_ids
from common.types import FinishReason, SamplingParams, StoppingParams, StructuredOutput
from engine.draft_model import load_draft_model
from engine.grammar_state import GrammarState
from engine.model_runner import ModelRunner, RunnerSettings
from engine.sequence import Sequence
from engine.tiny import make_checkpoint
from testing.equality.cases import Answer, Case, differences, expect, make_cases
from testing.equality.drafters import KINDS as DRAFTERS
from testing.equality.drafters import Kind, SpeculatingWorkers, drafter_of
from testing.equality.workers import Workers
from testing.oracle import Oracle
from worker.grammars import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": StructuredOutput("json_schema", json.dumps(SCHEMA)),
    "regex": StructuredOutput("regex", "[a-f]{3,12}(-[0-9]{2}){1,4}"),
    "choice": StructuredOutput("choice", options=("once upon a time", "once upon a hill", "far away")),
    "lark": StructuredOutput("lark", 'start: item ("," item){2,5}\nitem: "(" /[a-z]{1,4}/ ")"'),
}
HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.2, "logprobs": 1},
    "n=4": {"temperature": 1.0, "seed": 11, "num_sequences": 4, "frequency_penalty": 0.3, "logprobs": 2},
}
TIGHT = 26


class Subject:
    """A tiny model and its expected answers."""

    def __init__(self, directory: Path) -> None:
        make_checkpoint(directory, "llama", seed=4, dtype=torch.bfloat16)
        self.runner = ModelRunner(RunnerSettings(directory, num_threads=1, max_model_len=256, device="cpu"))
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.grammars = Grammars(str(directory), self.runner.config.vocab_size)
        stopping = StoppingParams(max_tokens=48, stop_token_ids=eos_token_ids(directory))
        free = make_cases(self.runner.config.vocab_size)
        self.cases = [
            Case(f"{how}, {name}", free[place].prompt, SamplingParams(**HOW[how], structured=grammar), stopping)
            for place, how in enumerate(HOW)
            for name, grammar in GRAMMARS.items()
        ]
        self.cases += [case for case in free if case.name.startswith(("greedy", "n=4", "beam"))]
        oracle = Oracle(self.runner)
        self.cases += [
            banned for case in free if case.name.endswith("prompt 1") for banned in banned_cases(case, oracle)
        ]
        self.expected: list[Answer] = [
            expect(oracle, case, None if case.sampling.structured is None else partial(self.begin, case))
            for case in self.cases
        ]

    def begin(self, case: Case) -> GrammarState:
        sequence = Sequence(list(case.prompt), [], case.sampling, case.stopping)
        self.grammars.attach([sequence])
        assert sequence.grammar is not None
        return sequence.grammar

    def check(self, workers: Workers, **how: Any) -> None:
        found = [asked.answer for asked in workers.answer(self.cases, **how)]
        assert not (wrong := differences(self.cases, self.expected, found)), "\n".join(wrong)
        workers.assert_idle()


def banned_cases(case: Case, oracle: Oracle) -> Iterator[Case]:
    """Returns the case with bad words from its usual output, and the case with few allowed tokens."""
    said = expect(oracle, case)[0].token_ids
    bad = tuple(ids for ids in (tuple(said[1:2]), tuple(said[3:5]), tuple(said[6:9])) if ids)
    yield replace(case, name=f"{case.name}, bad", sampling=replace(case.sampling, bad_token_ids=bad))
    if case.sampling.beam_width is None:
        allowed = (*range(11, 60, 3), *case.stopping.stop_token_ids[:1])
        yield replace(case, name=f"{case.name}, allowed", sampling=replace(case.sampling, allowed_token_ids=allowed))


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def make_workers(subject: Subject, redis_client: Any, tmp_path: Path) -> Iterator[Any]:
    made: list[Workers] = []

    def make(**settings: Any) -> Workers:
        directory = tmp_path / str(len(made))
        made.append(Workers(subject.runner, directory, redis_client, grammars=subject.grammars, **settings))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def test_the_requests_are_worth_comparing(subject: Subject) -> None:
    """Answers match their grammars, most end because of them, samples differ, and answers without the
    grammars differ.
    """
    texts = [text for case, answer in zip(subject.cases, subject.expected, strict=True)
             if case.sampling.structured is not None for text in answer]  # fmt: skip
    ended = [text for text in texts if text.finish_reason is FinishReason.STOP]
    assert len(ended) >= len(texts) // 2
    for case, answer in zip(subject.cases, subject.expected, strict=True):
        if case.name.endswith("schema"):
            for text in answer:
                if text.finish_reason is FinishReason.STOP:
                    found = json.loads(subject.tokenizer.decode(text.token_ids))
                    assert set(found) <= set(SCHEMA["properties"]) and 0 <= found["age"] <= 99  # type: ignore[call-overload]
    for case, answer in zip(subject.cases, subject.expected, strict=True):
        for text in answer:
            for bad in case.sampling.bad_token_ids:
                assert not any(tuple(text.token_ids[i : i + len(bad)]) == bad for i in range(len(text.token_ids)))
            assert set(text.token_ids) <= set(case.sampling.allowed_token_ids or text.token_ids)
    free = expect(Oracle(subject.runner), subject.cases[0])
    assert free[0].token_ids != subject.expected[0][0].token_ids


@pytest.mark.parametrize("budget", [16, 512])
def test_handed_over_cold_and_cached(subject: Subject, make_workers: Any, budget: int) -> None:
    workers = make_workers(budget=budget)
    subject.check(workers)
    subject.check(workers)


def test_preempted_by_swap(subject: Subject, make_workers: Any) -> None:
    workers = make_workers(num_blocks=TIGHT, preemption="swap")
    subject.check(workers)
    assert workers.preemption.counts.swapped_groups > 0


def test_preempted_and_given_back(subject: Subject, make_workers: Any) -> None:
    workers = make_workers(num_blocks=TIGHT)
    subject.check(workers)
    assert workers.preemption.counts.given_back_groups > 0


def test_decode_killed_midway(subject: Subject, make_workers: Any) -> None:
    workers = make_workers()

    def kill(them: Workers) -> None:
        if them.num_steps in (4, 9, 20):
            them.kill_decode()

    subject.check(workers, before_step=kill)
    assert workers.num_returned >= len(subject.cases)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_change_no_token(subject: Subject, redis_client: Any, tmp_path: Path, kind: Kind) -> None:
    drafter = drafter_of(kind, subject.cases, subject.expected, subject.runner.config.vocab_size)
    workers = SpeculatingWorkers(drafter, subject.runner, tmp_path, redis_client, grammars=subject.grammars)
    subject.check(workers)
    workers.check_accepted(kind)
    workers.close()


def test_a_draft_model_changes_no_token(subject: Subject, redis_client: Any, tmp_path: Path) -> None:
    """It knows no grammar, so drafts end before tokens that are not allowed."""
    draft_runner = load_draft_model(str(subject.runner.settings.model), subject.runner)
    workers = SpeculatingWorkers(draft_runner, subject.runner, tmp_path, redis_client, grammars=subject.grammars)
    subject.check(workers)
    counts = workers.speculation.counts
    assert sum(counts.accepted_by_position) > counts.num_draft_tokens // 2 > 50
    workers.close()


def test_a_state_that_has_forgotten_a_token_shows(
    subject: Subject, make_workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that the tests above can fail: a replay without the last token gives another answer or none."""
    follow = GrammarState.follow

    def forget(state: GrammarState, output_ids: list[int]) -> None:
        if len(output_ids) > 1 and state._followed == 0:  # during a replay
            follow(state, output_ids[:-1])
            state._followed = len(output_ids)
        else:
            follow(state, output_ids)

    workers = make_workers(num_blocks=TIGHT)
    monkeypatch.setattr(GrammarState, "follow", forget)
    with pytest.raises((AssertionError, InvalidArgument)):
        subject.check(workers)
