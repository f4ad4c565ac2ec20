"""The HTTP fields for structured output: each spelling becomes the same grammar, and errors name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidArgument
from common.types import StructuredOutput
from gateway.api.openai_parse import parse_body
from gateway.api.openai_request import ChatBody, CompletionBody
from gateway.intake.limits import PromptLimits

LIMITS = PromptLimits(1 << 16, 1 << 16, 1024)
SCHEMA = '{"type": "object", "properties": {"é": {"const": "null"}}}'
OF_SCHEMA = StructuredOutput("json_schema", SCHEMA)


def wanted(fields: str) -> tuple[str, StructuredOutput | None]:
    """Returns the grammar that a chat and a completion with these fields (JSON) request."""
    messages = '"messages": [{"role": "user", "content": "x"}]'
    [chat] = parse_body(ChatBody, f"{{{messages}, {fields}}}".encode(), LIMITS).all_wanted()
    [completion] = parse_body(CompletionBody, f'{{"prompt": "x", {fields}}}'.encode(), LIMITS).all_wanted()
    assert (chat.structured_field, chat.structured) == (completion.structured_field, completion.structured)
    return chat.structured_field, chat.structured


@pytest.mark.parametrize(
    ("fields", "name", "structured"),
    [
        ('"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": '
         + SCHEMA + "}}", "response_format.json_schema.schema", OF_SCHEMA),
        ('"response_format": {"type": "json_object"}', "response_format", StructuredOutput("json_object")),
        (f'"guided_json": {SCHEMA}', "guided_json", OF_SCHEMA),
        (f'"guided_json": {json.dumps(SCHEMA)}', "guided_json", OF_SCHEMA),
        ('"guided_json": true', "guided_json", StructuredOutput("json_schema", "true")),
        ('"guided_regex": "a+"', "guided_regex", StructuredOutput("regex", "a+")),
        ('"guided_choice": ["a", "b"]', "guided_choice", StructuredOutput("choice", options=("a", "b"))),
        ('"guided_grammar": "start: A"', "guided_grammar", StructuredOutput("lark", "start: A")),
        (f'"structured_outputs": {{"json": {SCHEMA}}}', "structured_outputs.json", OF_SCHEMA),
        ('"structured_outputs": {"json_object": true}', "structured_outputs.json_object",
         StructuredOutput("json_object")),
        ('"structured_outputs": {"regex": "a"}', "structured_outputs.regex", StructuredOutput("regex", "a")),
        ('"structured_outputs": {"choice": ["a"]}', "structured_outputs.choice",
         StructuredOutput("choice", options=("a",))),
        ('"structured_outputs": {"grammar": "start: A"}', "structured_outputs.grammar",
         StructuredOutput("lark", "start: A")),
    ],
)  # fmt: skip
def test_every_spelling(fields: str, name: str, structured: StructuredOutput) -> None:
    assert wanted(fields) == (name, structured)


@pytest.mark.parametrize(
    "fields",
    [
        '"response_format": null', '"response_format": {"type": "text"}', '"guided_json": null, "guided_regex": null',
        '"structured_outputs": {}', '"structured_outputs": {"json_object": false, "json": null}',
        '"guided_decoding_backend": "auto"',
    ],
)  # fmt: skip
def test_free_text(fields: str) -> None:
    assert wanted(fields)[1] is None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('"guided_regex": 5', "guided_regex"),
        ('"guided_choice": [5]', "guided_choice"),
        ('"guided_choice": "a"', "guided_choice"),
        ('"response_format": {"type": "xml"}', "response_format.type must be text, json_object or json_schema"),
        ('"response_format": {"type": "json_schema"}', "response_format.json_schema.schema must be given"),
        ('"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}', "schema must be given"),
        ('"response_format": {"type": "json_object", "more": 1}', "response_format.more is not a known field"),
        ('"structured_outputs": {"structural_tag": "x"}', "structured_outputs.structural_tag is not a known field"),
        ('"guided_regex": "a", "guided_choice": ["b"]', "guided_choice cannot be combined with guided_regex"),
        ('"guided_regex": "a", "response_format": {"type": "json_object"}', "cannot be combined with"),
        ('"guided_json": {"a": }', "JSON"),
        ('"guided_json": ' + '{"a":' * 9000 + "1" + "}" * 9000, "nested"),
        (f'"guided_json": {{"description": "{"x" * 70_000}"}}', "guided_json must take at most 65536 bytes"),
    ],
)
def test_what_is_wrong(fields: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wanted(fields)
    assert says in caught.value.message


def test_a_choice_of_other_types_is_wrong_everywhere() -> None:
    body: dict[str, Any] = {"prompt": "x", "structured_outputs": {"choice": [None]}}
    with pytest.raises(InvalidArgument, match=r"structured_outputs\.choice"):
        parse_body(CompletionBody, json.dumps(body).encode(), LIMITS)
