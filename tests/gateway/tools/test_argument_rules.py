"""Grammars that enforce calls whose arguments are not one JSON object. The family's parser reads everything that they
allow.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from common.grammar import compile_grammar, load_tokenizer
from engine.tiny import write_tokenizer
from gateway.tools.call_format import CallFormat
from gateway.tools.call_parsers import merged
from gateway.tools.enforce import Function, calls_grammar
from gateway.tools.formats import special_ids
from gateway.tools.known_formats import (
    DEEPSEEK_V32,
    FUNCTION_GEMMA,
    GEMMA4,
    GLM45,
    GLM47,
    HARMONY,
    LFM2,
    LLAMA4_PYTHONIC,
    MINIMAX_M2,
    OLMO3,
    PYTHONIC,
    QWEN3_CODER,
    SEED_OSS,
)
from tests.gateway.tools.test_recorded_outputs import dsml, dsml_calls, found, glm, minimax, qwen

TAGGED = (QWEN3_CODER, SEED_OSS, GLM45, GLM47, MINIMAX_M2, DEEPSEEK_V32)
PYTHON = (PYTHONIC, LLAMA4_PYTHONIC, LFM2, OLMO3)
QUOTED = (GEMMA4, FUNCTION_GEMMA)
FORMS = (*TAGGED, *PYTHON, *QUOTED)
MARKS = sorted({mark for form in (*FORMS, HARMONY) for mark in form.marks})
WEATHER = Function(
    "get_weather",
    {"type": "object", "$defs": {"Unit": {"enum": ["c", "é 🌧", None]}}, "required": ["city", "days"], "properties": {
        "city": {"type": "string", "description": "d"}, "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"$ref": "#/$defs/Unit"}, "sure": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
        "at": {"type": "array", "items": {"type": "number"}, "maxItems": 2}}},
)  # fmt: skip
LOOSE, NOW = Function("loose", {}), Function("now", {"type": "object", "properties": {}, "additionalProperties": False})
FUNCTIONS = [WEATHER, LOOSE, NOW]
Calls = list[tuple[str, dict[str, Any]]]
GOOD: list[Calls] = [
    [("get_weather", {"city": "Pa<r>is\n", "days": 3})],
    [
        (
            "get_weather",
            {"city": "Rome", "days": 7, "unit": "é 🌧", "sure": True, "note": "é 🌧", "kind": "b", "at": [1, 2.5]},
        )
    ],
    [("get_weather", {"city": "x", "days": 1, "sure": False, "note": None, "kind": None})],
    [("loose", {"any_name": "any < text"})],
    [("loose", {})],
    [("now", {})],
    [("now", {}), ("get_weather", {"city": "Paris", "days": 1})],
]
BAD: list[Calls] = [
    [("get_weather", {"city": "Paris"})],
    [("get_weather", {"city": "Paris", "days": 8})],
    [("get_weather", {"city": "Paris", "days": 1, "unit": "k"})],
    [("get_weather", {"city": "Paris", "days": 1, "at": [1, 2, 3]})],
    [("get_weather", {"city": "Paris", "days": 1, "x": 1})],
    [("get_weather", {"city": "Paris", "days": 1, "kind": "c"})],
    [("now", {"x": "1"})],
    [("other", {})],
]


@pytest.fixture(scope="module", params=["text", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns (llguidance's tokenizer, ours, ids of the marks). The marks are text or special tokens."""
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    (directory / "config.json").write_text('{"eos_token_id": 2}')
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if request.param == "special":
        ours.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
        ours.save(str(directory / "tokenizer.json"))
    return load_tokenizer(directory, ours.get_vocab_size()), ours, special_ids(ours, MARKS)


def accepts(tokenizer: Any, matcher: LLMatcher, text: str) -> bool:
    matcher.reset()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return all(matcher.consume_token(token) for token in ids) and bool(matcher.is_accepting())


def tag_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def python_text(value: Any) -> str:
    return str(value) if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def quoted_text(value: Any, quote: str) -> str:
    if isinstance(value, list):
        return f"[{','.join(quoted_text(item, quote) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{quoted_text(item, quote)}' for key, item in value.items())}}}"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def spelled(form: CallFormat, calls: Calls) -> str:
    if form in QUOTED:
        return "".join(f"{form.marks[0]}call:{n}{quoted_text(a, form.quote)}{form.marks[1]}" for n, a in calls)
    if form is DEEPSEEK_V32:
        typed = [
            (n, [(k, str(isinstance(v, str)).lower(), tag_text(v)) for k, v in a.items()]) for n, a in calls
        ]  # fmt: skip
        return dsml_calls(*(dsml(name, *arguments) for name, arguments in typed))
    if form in PYTHON:
        written = [f"{n}({', '.join(f'{k}={python_text(v)}' for k, v in a.items())})" for n, a in calls]
        if form is OLMO3:
            return "<function_calls>" + "\n".join(written) + "</function_calls>"
        joined = f"[{', '.join(written)}]"
        return f"<|tool_call_start|>{joined}<|tool_call_end|>" if form is LFM2 else joined
    texts = [(name, {key: tag_text(value) for key, value in arguments.items()}) for name, arguments in calls]
    if form is MINIMAX_M2:
        return minimax(*texts)
    if form is GLM47:
        return "".join(glm(name, "", **arguments) for name, arguments in texts)
    if form is GLM45:
        return "\n".join(glm(name, **arguments) for name, arguments in texts)
    written = [qwen(name, **arguments) for name, arguments in texts]
    if form is SEED_OSS:
        written = [
            f"<seed:tool_call>\n<function={name}>\n"
            + "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in given.items())
            + "</function>\n</seed:tool_call>"
            for name, given in texts
        ]
    return "\n".join(written)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_grammar_takes_calls_and_nothing_else_and_the_parser_reads_them(tokenizer: Any, form: CallFormat) -> None:
    lltokenizer, ours, ids = tokenizer
    matcher = compile_grammar(lltokenizer, calls_grammar(form, FUNCTIONS, ids, many=True))
    for calls in GOOD:
        text = spelled(form, calls)
        assert accepts(ours, matcher, text), text
        parser = form.parser({f.name: f.parameters for f in FUNCTIONS}, None)
        content, read = found(merged(parser.feed(text) + parser.finish()))
        assert (content, [(name, json.loads(arguments)) for name, arguments in read]) == ("", calls)
    for calls in BAD:
        assert not accepts(ours, matcher, spelled(form, calls)), calls
    assert not accepts(ours, matcher, "Hello") and not accepts(ours, matcher, "")
    one = compile_grammar(lltokenizer, calls_grammar(form, [NOW], ids, many=False))
    assert accepts(ours, one, spelled(form, [("now", {})])) and not accepts(ours, one, spelled(form, [("now", {})] * 2))


@pytest.mark.parametrize("form", [form for form in FORMS if form.marker], ids=lambda form: form.name)
def test_strict_arguments_match_within_free_text(tokenizer: Any, form: CallFormat) -> None:
    lltokenizer, ours, ids = tokenizer
    if len(form.marker.encode()) > 20 and form.marker not in ids:
        with pytest.raises(ValueError, match="cannot be distinguished"):
            calls_grammar(form, FUNCTIONS, ids, many=True, free=True)
        return
    functions = [replace(WEATHER, strict=True), LOOSE]
    matcher = compile_grammar(lltokenizer, calls_grammar(form, functions, ids, many=True, free=True))
    for calls in (*GOOD[:3], [("loose", {"x": "1"}), *GOOD[0]]):
        assert accepts(ours, matcher, f"I < see. {spelled(form, calls)}\nSo [be] it."), calls
    assert accepts(ours, matcher, "a < b [c] <tool") and accepts(ours, matcher, "")
    for calls in BAD[:4]:
        assert not accepts(ours, matcher, "Hm. " + spelled(form, calls)), calls


CANNOT: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"day": {"type": "string", "pattern": "[0-9]+"}}}, "'day'"),
    ({"properties": {"day": {"type": ["string", "array"]}}}, "'day'"),
    ({"properties": {"day": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]}}}, "'day'"),
    ({"properties": {"day": {"enum": ["a</parameter>b"]}}}, "'day'"),
    ({"properties": {"a": {}}, "minProperties": 1}, "'minProperties'"),
    ({"properties": {"a b": {}}}, "'a b'"),
    ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 99 + [{"type": "string"}]}}}, "'a'"),
    ({"properties": {"a": {"type": "string", "anyOf": 5, "enum": 5}}}, "'a'"),
    ({"properties": 5}, "properties"),
]


@pytest.mark.parametrize(("parameters", "named"), CANNOT)
def test_a_schema_that_the_format_cannot_enforce_is_named(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        calls_grammar(QWEN3_CODER, [Function("f", parameters)], {}, many=False)


NESTED = Function(
    "nested",
    {"type": "object", "required": ["tags", "who"], "additionalProperties": False, "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "who": {"type": "object", "required": ["name"], "additionalProperties": False, "properties": {
            "name": {"type": "string"}, "age": {"type": ["integer", "null"]}}},
        "any": {}, "fixed": {"const": {"a": ["x", 1]}}, "pairs": {"type": "array", "items": {"enum": [1, "b"]}}}},
)  # fmt: skip


@pytest.mark.parametrize("form", QUOTED, ids=lambda form: form.name)
def test_texts_within_lists_and_objects_are_quoted_too(tokenizer: Any, form: CallFormat) -> None:
    lltokenizer, ours, ids = tokenizer
    matcher = compile_grammar(lltokenizer, calls_grammar(form, [NESTED], ids, many=False))
    good: list[dict[str, Any]] = [
        {"tags": ["a"], "who": {"name": "b"}},
        {"tags": ["a", "{"], "who": {"name": "b", "age": None}, "any": {"k": [True, "x"]}, "pairs": [1, "b", 1]},
        {"tags": ["a"], "who": {"name": "b", "age": 3}, "fixed": {"a": ["x", 1]}, "pairs": []},
    ]
    for arguments in good:
        text = spelled(form, [("nested", arguments)])
        assert accepts(ours, matcher, text), text
        parser = form.parser({"nested": NESTED.parameters}, None)
        assert found(merged(parser.feed(text) + parser.finish()))[1][0][1] == json.dumps(arguments)
    bad = [{"tags": [], "who": {"name": "b"}}, {"tags": ["a", "b", "c"], "who": {"name": "b"}},
           {"tags": ["a"], "who": {"age": 3}}, {"tags": ["a"], "who": {"name": "b"}, "pairs": [2]},
           {"tags": ["a"], "who": {"name": "b"}, "fixed": {"a": ["x", 2]}},
           {"tags": [1], "who": {"name": "b"}}]  # fmt: skip
    for arguments in bad:
        assert not accepts(ours, matcher, spelled(form, [("nested", arguments)])), arguments


CANNOT_BE_QUOTED: list[tuple[dict[str, Any], str]] = [
    ({"a": {"type": "string", "maxLength": 5}}, "'maxLength'"),
    ({"a": {"type": "array", "uniqueItems": True}}, "'uniqueItems'"),
    ({"a": {"type": "object", "properties": {"b": {"pattern": "x"}}}}, "'pattern'"),
    ({"a": {"$ref": "#"}}, "recursive"),
    ({"a": {"$ref": "#/$defs/b"}}, "not there"),
    ({"a": {"type": "object", "properties": {"b": {"$ref": "#/properties/a"}}}}, "recursive"),
    ({"a b": {}}, "'a b'"),
    ({"a": {"enum": ['<|"|>']}}, "value"),
    ({"a": {"enum": []}}, "without a value"),
    ({"a": {"type": "array", "minItems": 3, "maxItems": 2}}, "limits"),
    ({"a": {"type": "array", "minItems": "3"}}, "limits"),
    ({"a": {"type": 5}}, "type"),
]  # fmt: skip


@pytest.mark.parametrize(("properties", "named"), CANNOT_BE_QUOTED)
def test_a_schema_that_gemmas_notation_cannot_enforce_is_named(properties: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        calls_grammar(GEMMA4, [Function("f", {"type": "object", "properties": properties})], {}, many=False)


def test_harmony_allows_reasoning_and_one_call(tokenizer: Any) -> None:
    lltokenizer, ours, ids = tokenizer
    if not ids:
        with pytest.raises(ValueError, match="not a special token"):
            calls_grammar(HARMONY, [NOW], ids, many=True)
        return
    matcher = compile_grammar(lltokenizer, calls_grammar(HARMONY, [NOW, WEATHER], ids, many=True))
    call = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>Hm < so.\n<|end|><|start|>assistant"
    for name, arguments in (("now", "{}"), ("get_weather", '{"city": "x", "days": 3}')):
        assert accepts(ours, matcher, call.format(name, arguments))
        assert accepts(ours, matcher, thought + call.format(name, arguments))
    twice = call.format("now", "{}") + "<|call|><|start|>assistant" + call.format("now", "{}")
    for text in (twice, thought, call.format("get_weather", "{}"), "<|channel|>final<|message|>Hi", "Hi"):
        assert not accepts(ours, matcher, text), text
    with pytest.raises(ValueError, match="cannot be distinguished"):
        calls_grammar(HARMONY, [replace(NOW, strict=True)], ids, many=True, free=True)
