"""Options of `generate`: misspelled names are rejected, and values arrive in the right fields."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest

from common.convert import sampling_from_pb
from common.types import StructuredOutput
from looseleaf.options import GenerateOptions, build_request
from protos.v1 import types_pb2

EVERYTHING: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.25,
    "min_p": 0.125,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.5,
    "logit_bias": {7: -4.0},
    "bad_words": ["fox", "the wolf"],
    "allowed_token_ids": [5, 6],
    "seed": 11,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "n": 3,
    "beam_width": 4,
    "length_penalty": 0.5,
    "early_stopping": "never",
    "structured_output": StructuredOutput("choice", options=("a", "b")),
    "max_tokens": 9,
    "min_tokens": 4,
    "stop": ["end"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 8,
    "model": "m",
    "request_id": "r",
    "cache_salt": "s",
    "priority": -1,
    "timeout": 3.0,
}


def test_the_table_above_is_complete() -> None:
    assert set(EVERYTHING) == set(get_type_hints(GenerateOptions))


_CONVERTED = {
    "timeout",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "stop",
    "n",
    "early_stopping",
    "structured_output",
}


@pytest.mark.parametrize("name", sorted(set(EVERYTHING) - _CONVERTED))
def test_each_option_arrives_in_its_field(name: str) -> None:
    request = build_request("x", {name: EVERYTHING[name]})  # type: ignore[misc]
    holders = [
        m for m in (request.sampling, request.stopping, request.cache, request) if name in m.DESCRIPTOR.fields_by_name
    ]
    assert len(holders) == 1
    value = getattr(holders[0], name)
    assert (list(value) if name == "stop_token_ids" else value) == EVERYTHING[name]


def test_absent_options_stay_absent() -> None:
    request = build_request("x", {})
    assert not any(request.sampling.HasField(f.name) for f in request.sampling.DESCRIPTOR.fields if f.has_presence)
    assert not any(request.stopping.HasField(f.name) for f in request.stopping.DESCRIPTOR.fields if f.has_presence)
    assert not request.HasField("request_id") and not request.HasField("priority")


def test_zero_is_not_absent() -> None:
    request = build_request("x", {"temperature": 0.0, "seed": 0, "logprobs": 0, "max_tokens": 0})
    assert request.sampling.HasField("temperature") and request.sampling.HasField("seed")
    assert request.sampling.HasField("logprobs") and request.stopping.HasField("max_tokens")


def test_maps_and_stop_strings() -> None:
    request = build_request("x", {"logit_bias": {7: -4.0}, "stop": "end"})
    assert dict(request.sampling.logit_bias) == {7: -4.0}
    assert list(request.stopping.stop) == ["end"]
    assert list(build_request("x", {"stop": ["a", "b"]}).stopping.stop) == ["a", "b"]


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput("json_schema", '{"type": "null"}'),
        StructuredOutput("json_object"),
        StructuredOutput("regex", "a+"),
        StructuredOutput("choice", options=("a", "b")),
        StructuredOutput("lark", 'start: "a"'),
    ],
)
def test_a_grammar_arrives_as_it_was(wanted: StructuredOutput) -> None:
    message = build_request("x", {"structured_output": wanted}).sampling
    assert sampling_from_pb(message).structured == wanted


def test_free_text_has_no_grammar() -> None:
    assert sampling_from_pb(build_request("x", {}).sampling).structured is None


def test_samples_and_the_kinds_of_early_stopping() -> None:
    assert build_request("x", {"n": 3}).sampling.num_sequences == 3
    kinds = [build_request("x", {"early_stopping": value}).sampling.early_stopping for value in (True, False, "never")]
    assert kinds == [
        types_pb2.BEAM_STOPPING_EARLY,
        types_pb2.BEAM_STOPPING_HEURISTIC,
        types_pb2.BEAM_STOPPING_NEVER,
    ]


@pytest.mark.parametrize(
    "prompt,kind",
    [
        ("text", "text"),
        ("", "text"),
        ([1, 2], "token_ids"),
        ([], "token_ids"),
        ([{"role": "user", "content": "hi"}], "chat"),
    ],
)
def test_each_kind_of_prompt(prompt: Any, kind: str) -> None:
    assert build_request(prompt, {}).WhichOneof("prompt") == kind


def test_a_misspelt_option_names_the_right_one() -> None:
    with pytest.raises(TypeError, match=r"unknown option 'temprature'; did you mean 'temperature'\?"):
        build_request("x", {"temprature": 1.0})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    "name,value",
    [
        ("temperature", "hot"),
        ("max_tokens", 1.5),
        ("max_tokens", -1),
        ("top_k", 1 << 40),
        ("n", -1),
        ("early_stopping", 1),
        ("early_stopping", "always"),
        ("early_stopping", []),
    ],
)
def test_a_value_of_the_wrong_type_names_the_option(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        build_request("x", {name: value})  # type: ignore[misc]


def test_a_turn_must_have_role_and_content() -> None:
    with pytest.raises(TypeError, match="message 1"):
        build_request([{"role": "user", "content": "a"}, {"role": "user", "text": "b"}], {})


def test_what_may_be_said_arrives() -> None:
    sampling = build_request("x", {"bad_words": ["fox", "the wolf"], "allowed_token_ids": [5, 6]}).sampling
    assert list(sampling.bad_words) == ["fox", "the wolf"] and list(sampling.allowed_token_ids.ids) == [5, 6]
    assert not build_request("x", {}).sampling.HasField("allowed_token_ids")
