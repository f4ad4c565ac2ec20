"""The arms of `testing.schemas` at their smallest size, and proof that their checks can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import pytest

from looseleaf.serve.model_source import BUILT_IN
from testing.chaos.report import Report
from testing.chaos.stack import Stack
from testing.schemas.__main__ import judge, tokenizer
from testing.schemas.answers import MAX_TOKENS, Answer, wrong
from testing.schemas.arms import ARMS, Result, run
from testing.schemas.random_schemas import ODD, long_schemas, random_schemas

SEED = 20
LONG = long_schemas(8, SEED)
SCHEMAS = [*LONG, *random_schemas(60, SEED)]
"""The schemas with long answers come first, so that the first kill interrupts some of them."""
ROUNDS = 5


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(BUILT_IN, ARMS["plain"].plan) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> Result:
    return run(ARMS["plain"], stack, SCHEMAS)


def found(name: str, result: Result, undisturbed: Result) -> Report:
    report = Report(name, len(result.answers), SEED)
    judge(report, ARMS[name], result, undisturbed.answers)
    return report


def test_every_answer_validates_or_the_request_is_refused(undisturbed: Result) -> None:
    report = found("plain", undisturbed, undisturbed)
    assert report.good, report.text()
    assert sum(answer.outcome == "stop" for answer in undisturbed.answers) > 0.85 * len(SCHEMAS), report.text()


def test_decode_workers_killed_midway_change_no_answer(stack: Stack, undisturbed: Result) -> None:
    """Repeats the requests until an answer spans a kill: the killed worker may have none of those that are midway."""
    for _ in range(ROUNDS):
        result = run(ARMS["kill"], stack, SCHEMAS)
        assert found("plain", result, undisturbed).good, found("kill", result, undisturbed).text()
        if result.num_spanning:
            break
    report = found("kill", result, undisturbed)
    assert report.good, report.text()


def test_swapping_changes_no_answer(stack: Stack) -> None:
    """Three of the eight answers need more blocks than the decode worker has, so groups are swapped at any speed."""
    undisturbed = run(ARMS["plain"], stack, LONG)
    with Stack(BUILT_IN, ARMS["swap"].plan) as tight:
        report = found("swap", run(ARMS["swap"], tight, LONG), undisturbed)
    assert report.good, report.text()


def test_the_checks_can_fail(undisturbed: Result) -> None:
    """Arms without a kill or a swap fail, and so do answers that are invalid, cut too early, or different."""
    assert not found("kill", undisturbed, undisturbed).good
    assert not found("swap", undisturbed, undisturbed).good
    grammars = tokenizer()
    complete = next(answer for answer in undisturbed.answers if answer.outcome == "stop")
    for changes in ({"text": complete.text[:-1]}, {"outcome": "length"}, {"outcome": "failed"}, {"outcome": "refused"}):
        assert wrong(replace(complete, **changes), grammars), changes
    other = replace(complete, token_ids=[*complete.token_ids, 1])
    answers = [other if answer is complete else answer for answer in undisturbed.answers]
    assert not found("plain", Result(answers), undisturbed).good


def test_a_number_that_never_ends_is_the_beginning_of_a_match() -> None:
    grammars = tokenizer()
    ids = [token for text in ["1."] + ["3"] * (MAX_TOKENS - 2) for token in grammars.tokenize_str(text)]
    answer = Answer({"type": "number"}, "length", token_ids=ids[:MAX_TOKENS])
    assert not wrong(answer, grammars)
    assert wrong(replace(answer, token_ids=ids[:-1]), grammars)
    assert wrong(replace(answer, schema={"type": "integer"}), grammars)


@pytest.mark.parametrize("schema", ODD, ids=lambda schema: "-".join(schema))
def test_odd_keywords_are_kept_or_refused_by_name(stack: Stack, schema: dict[str, Any]) -> None:
    for seed in range(4):
        body = {"prompt": "Once", "max_tokens": 200, "temperature": 1.0, "seed": seed, "guided_json": schema}
        reply = httpx.post(f"http://{stack.addresses.http}/v1/completions", json=body, timeout=60)
        if reply.status_code == 400:
            assert reply.json()["error"]["param"] == "guided_json"
            return
        [choice] = reply.json()["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.Draft202012Validator(schema).validate(json.loads(choice["text"]))
