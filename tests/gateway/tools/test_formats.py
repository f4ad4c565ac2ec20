"""The family of a chat template, ids of calls, and grammars that enforce calls."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken

from common.grammar import compile_grammar, load_tokenizer
from engine.tiny import write_tokenizer
from gateway.tools.call_format import CallFormat
from gateway.tools.call_parsers import merged
from gateway.tools.enforce import Function, calls_grammar
from gateway.tools.formats import CallIds, special_ids
from gateway.tools.known_formats import (
    COHERE,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    FUNCTION_GEMMA,
    GEMMA4,
    GLM45,
    GLM47,
    GRANITE,
    HARMONY,
    HERMES,
    HUNYUAN,
    INTERNLM,
    JSON,
    KIMI_K2,
    LFM2,
    LLAMA3,
    LLAMA4,
    LLAMA4_PYTHONIC,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_COMPACT,
    OLMO3,
    PHI4_MINI,
    PYTHONIC,
    QWEN3_CODER,
    SEED_OSS,
    call_format,
)
from gateway.tools.pieces import CallArguments, CallBegin, Content, Piece
from gateway.tools.section_parsers import DeepSeekParser, KimiParser
from testing.gateway import tool_templates
from tests.gateway.tools.test_call_parsers import deepseek, deepseek_v31
from tests.gateway.tools.test_recorded_outputs import kimi

TEMPLATES: list[tuple[str, CallFormat | None]] = [
    (tool_templates.HERMES, HERMES),
    (tool_templates.LLAMA3, LLAMA3),
    ("<|start_header_id|>{{ tools }}<|python_tag|>", LLAMA3),
    (tool_templates.MISTRAL, MISTRAL),
    ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", MISTRAL_COMPACT),
    ('{{ tools }} Answer with {"name": ..., "arguments": {...}}', JSON),
    ("{{ tools }}<tool_call>\n<function=name>\n<parameter=x>", QWEN3_CODER),
    ("{{ tools }}<tool_call>name\n<arg_key>k</arg_key>\n<arg_value>", GLM45),
    ("{{ tools }}<tool_call>name<arg_key>k</arg_key><arg_value>", GLM47),
    ("{{ tools }}<seed:tool_call>\n<function=name>\n<parameter=x>", SEED_OSS),
    ("{{ tools }}<minimax:tool_call>\n<invoke name=", MINIMAX_M2),
    ("{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>", KIMI_K2),
    ("{{ tools }}<tool_calls>[{{ calls }}]</tool_calls>", HUNYUAN),
    ("{{ tools }}<|action_start|><|plugin|>", INTERNLM),
    ('<|header_start|>{{ tools }}<|python_start|>{"name": "parameters": }', LLAMA4),
    ("<|header_start|>{{ tools }} as [func_name1(params_name1=params_value1)]", LLAMA4_PYTHONIC),
    ("<|tool_list_start|>{{ tools }}", LFM2),
    ("{{ tools }}<function_calls>", OLMO3),
    ("<|start|>{{ tools }}<|channel|>commentary to=functions.x <|constrain|>json<|message|>", HARMONY),
    ("{{ tools }}<|channel|>commentary to=functions.x", None),
    ("{{ tools }}<|START_ACTION|>[{{ calls }}]<|END_ACTION|>", COHERE),
    ("{{ tools }}<start_function_call>call:f{k:<escape>v<escape>}<end_function_call>", FUNCTION_GEMMA),
    ('{{ tools }}<|tool_call>call:f{k:<|"|>v<|"|>}<tool_call|>', GEMMA4),
    ("{{ tools }}<\uff5ctool\u2581calls\u2581begin\uff5c>", DEEPSEEK_V31),
    ("{{ tools }}<\uff5ctool\u2581calls\u2581begin\uff5c>...\\n```json\\n", DEEPSEEK_V3),
    ("{{ tools }}<\uff5cDSML\uff5cfunction_calls>", DEEPSEEK_V32),
    ("{{ tools }}<\uff5cDSML\uff5ctool_calls>", None),
    ('{{ tools }}<|start_of_role|>assistant<|end_of_role|><|tool_call|>[{"arguments": ...}]', GRANITE),
    ('{{ tools }}<|tool_call|>{"arguments": ...}', None),
    ('{{ tools }} prefix calls with functools[{"name": name, "arguments": {...}}]', PHI4_MINI),
    ('<|start_header_id|>{{ tools }}"parameters": [func_name1(name=value)]', PYTHONIC),
    ('{{ tools }}<|tool_call>{"parameters": }<tool_call|>', None),
    ("{{ tools }}", None),
    ("", None),
]


@pytest.mark.parametrize(("template", "expected"), TEMPLATES)
def test_the_family_is_seen_from_the_template(template: str, expected: CallFormat | None) -> None:
    assert call_format("auto", template) is expected
    assert call_format("hermes", template) is HERMES and call_format("json", template) is JSON
    assert call_format("mistral", template) is (MISTRAL_COMPACT if expected is MISTRAL_COMPACT else MISTRAL)


def test_ids_have_their_familys_form_and_differ() -> None:
    ids = CallIds(HERMES.new_id)
    assert len({ids.next() for _ in range(100)}) == 100 and re.fullmatch(r"call_[0-9a-f]{24}", ids.next())
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", CallIds(MISTRAL.new_id).next())
    drawn = iter(["a", "a", "b"])
    narrow = CallIds(lambda: next(drawn))
    assert [narrow.next(), narrow.next()] == ["a", "b"]
    own = CallIds(lambda: "random")
    assert [own.next("functions.f:0"), own.next("functions.f:0")] == ["functions.f:0", "random"]


# --- grammars

CITY = Function(
    "get_weather",
    {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
     "additionalProperties": False, "$defs": {"City": {"enum": ["Paris", "R\"ome"]}}},
)  # fmt: skip
TIME = Function("get_time", {"type": "object", "properties": {"zone": {"type": "integer"}}, "required": []})
ANY = Function("get_weather2", {})
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", *DEEPSEEK_V3.marks,
         *GRANITE.marks, *KIMI_K2.marks, *HUNYUAN.marks, *INTERNLM.marks, *COHERE.marks)  # fmt: skip
FORMS = {
    "hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "mistral11": MISTRAL_COMPACT, "json": JSON,
    "deepseek": DEEPSEEK_V3, "deepseek31": DEEPSEEK_V31, "granite": GRANITE, "phi4": PHI4_MINI, "llama4": LLAMA4,
    "kimi": KIMI_K2, "hunyuan": HUNYUAN, "internlm": INTERNLM, "cohere": COHERE,
}  # fmt: skip


@pytest.fixture(scope="module", params=["text", "special"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns (llguidance's tokenizer, ours, ids of the markers). The markers are text or special tokens."""
    from tokenizers import Tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    (directory / "config.json").write_text('{"eos_token_id": 2}')
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if request.param == "special":
        ours.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
        ours.save(str(directory / "tokenizer.json"))
    ids = special_ids(ours, MARKS)
    assert len(ids) == (len(MARKS) if request.param == "special" else 0)
    return load_tokenizer(directory, ours.get_vocab_size()), ours, ids


def accepts(tokenizer: Any, matcher: LLMatcher, text: str) -> bool:
    """Returns whether the grammar accepts exactly this text."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    matcher.reset()
    return all(matcher.consume_token(token) for token in ids) and bool(matcher.is_accepting())


def spelled(form: CallFormat, calls: list[tuple[str, str]]) -> str:
    """Returns calls in the format of the family."""
    if form is MISTRAL_COMPACT:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
    if form.name.startswith("deepseek"):
        write = {"deepseek_v3": deepseek, "deepseek_v31": deepseek_v31}[form.name]
        between = "\n" if form is DEEPSEEK_V3 else ""
        written = between.join(write(name, arguments) for name, arguments in calls)
        return DeepSeekParser.OPEN + written + DeepSeekParser.CLOSE
    if form is KIMI_K2:
        return KimiParser.OPEN + "".join(kimi(n, *call) for n, call in enumerate(calls)) + KimiParser.CLOSE
    if form is COHERE:
        lines = [f'    {{"tool_call_id": "{n}", "tool_name": "{name}", "parameters": {arguments}}}'
                 for n, (name, arguments) in enumerate(calls)]  # fmt: skip
        return "<|START_ACTION|>[\n" + ",\n".join(lines) + "\n]<|END_ACTION|>"
    key = "parameters" if form in (LLAMA3, LLAMA4, INTERNLM) else "arguments"
    items = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if form is HERMES:
        return "\n".join(f"<tool_call>\n{item}\n</tool_call>" for item in items)
    if form is INTERNLM:
        return "\n".join(f"<|action_start|><|plugin|>\n{item}<|action_end|>" for item in items)
    joined = ", ".join(items)
    before = {"mistral": "[TOOL_CALLS] ", "json": "", "granite": "<|tool_call|>", "phi4_mini_json": "functools",
              "hunyuan_a13b": "<tool_calls>"}  # fmt: skip
    end = "</tool_calls>" if form is HUNYUAN else ""
    return joined if form in (LLAMA3, LLAMA4) else f"{before[form.name]}[{joined}]{end}"


@pytest.mark.parametrize("name", FORMS)
def test_the_grammar_takes_calls_and_nothing_else_and_the_parser_reads_them(tokenizer: Any, name: str) -> None:
    lltokenizer, ours, ids = tokenizer
    form, functions = FORMS[name], [CITY, TIME, ANY]
    matcher = compile_grammar(lltokenizer, calls_grammar(form, functions, ids, many=True))
    good = [
        [("get_weather", '{"city": "Paris"}')],
        [("get_weather", '{"city": "R\\"ome"}')],
        [("get_time", '{"zone": 3}')],
        [("get_time", "{}")],
        [("get_weather2", '{"x": [1, {"y": null}]}')],
    ]
    if form not in (LLAMA3, LLAMA4):
        good.append([("get_time", "{}"), ("get_weather", '{"city": "Paris"}')])
    for calls in good:
        text = spelled(form, calls)
        assert accepts(ours, matcher, text), text
        parser = form.parser({f.name: f.parameters for f in functions}, None)
        pieces: list[Piece] = merged(parser.feed(text) + parser.finish())
        read = [(p.name, q.text) for p, q in zip(pieces[::2], pieces[1::2], strict=True)
                if isinstance(p, CallBegin) and isinstance(q, CallArguments)]  # fmt: skip
        assert read == calls and not any(isinstance(p, Content) for p in pieces)
    for calls in ([("get_weather", '{"city": "Bonn"}')], [("other", "{}")], [("get_weather", "{}")], []):
        assert not accepts(ours, matcher, spelled(form, calls)), calls
    assert not accepts(ours, matcher, "Hello") and not accepts(ours, matcher, "")


@pytest.mark.parametrize("name", FORMS)
def test_a_single_call_is_one_call(tokenizer: Any, name: str) -> None:
    lltokenizer, ours, ids = tokenizer
    form = FORMS[name]
    matcher = compile_grammar(lltokenizer, calls_grammar(form, [TIME], ids, many=False))
    one = spelled(form, [("get_time", "{}")]).strip("[]") if form is JSON else spelled(form, [("get_time", "{}")])
    assert accepts(ours, matcher, one)
    assert not accepts(ours, matcher, spelled(form, [("get_time", "{}")] * 2))


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name].marker])
def test_strict_arguments_match_within_free_text(tokenizer: Any, name: str) -> None:
    lltokenizer, ours, ids = tokenizer
    form, functions = FORMS[name], [replace(CITY, strict=True), TIME]
    if len(form.marker.encode()) > 20 and form.marker not in ids:
        with pytest.raises(ValueError, match="cannot be distinguished"):
            calls_grammar(form, functions, ids, many=True, free=True)
        return
    matcher = compile_grammar(lltokenizer, calls_grammar(form, functions, ids, many=True, free=True))
    paris, any_time = ("get_weather", '{"city": "Paris"}'), ("get_time", '{"zone": "a", "x": 1}')
    for calls in ([paris], [any_time], [any_time, paris]):
        for text in (spelled(form, calls), f"I < see. {spelled(form, calls)}\nSo [be] it."):
            assert accepts(ours, matcher, text), text
    for text in ("", "Hello", "a < b [c] <tool"):
        assert accepts(ours, matcher, text), text
    for call in (("get_weather", '{"city": "Bonn"}'), ("other", "{}"), ("get_time", "[]")):
        assert not accepts(ours, matcher, "Hm. " + spelled(form, [call])), call
    assert not accepts(ours, matcher, f"{form.marker} oops")
    one = compile_grammar(lltokenizer, calls_grammar(form, functions, ids, many=False, free=True))
    assert accepts(ours, one, spelled(form, [paris])) and not accepts(ours, one, spelled(form, [paris, paris]))
    begun = compile_grammar(lltokenizer, calls_grammar(form, functions, ids, many=True, thinking="open", free=True))
    assert accepts(ours, begun, f"Hm.\n</think>\n\nHello {spelled(form, [paris])}")


@pytest.mark.parametrize("form", [LLAMA3, JSON, PYTHONIC])
def test_a_call_without_a_marker_cannot_be_strict_within_free_text(form: CallFormat) -> None:
    with pytest.raises(ValueError, match="cannot be distinguished"):
        calls_grammar(form, [replace(CITY, strict=True)], {}, many=True, free=True)


@pytest.mark.parametrize("name", ["hermes", "json"])
def test_reasoning_may_precede_forced_calls(tokenizer: Any, name: str) -> None:
    lltokenizer, ours, ids = tokenizer
    form = FORMS[name]
    call = spelled(form, [("get_time", "{}")])
    optional = compile_grammar(lltokenizer, calls_grammar(form, [TIME], ids, many=True, thinking="optional"))
    assert accepts(ours, optional, call) and accepts(ours, optional, f"<think>\nHm <b>.\n</think>\n\n{call}")
    assert not accepts(ours, optional, f"Hm.</think>{call}") and not accepts(ours, optional, "<think>Hm.</think>x")
    begun = compile_grammar(lltokenizer, calls_grammar(form, [TIME], ids, many=True, thinking="open"))
    assert accepts(ours, begun, f"Hm.\n</think>\n\n{call}") and accepts(ours, begun, f"</think>{call}")
    assert not accepts(ours, begun, call)


def test_a_schema_keeps_what_it_accepts_and_loses_its_descriptions() -> None:
    notes = {"description": "d", "title": "t", "default": {"x": 1}, "examples": [1]}
    named = {"type": "object", "properties": {"description": {"type": "string", **notes}, "title": {"const": notes}}}
    source = calls_grammar(HERMES, [Function("f", {**named, **notes, "anyOf": [notes]})], {}, many=False).source
    schema = json.loads(re.search(r"%json (.*)", source)[1])  # type: ignore[index]
    assert schema.pop("x-guidance")
    assert schema == {
        "type": "object", "anyOf": [{}],
        "properties": {"description": {"type": "string"}, "title": {"const": notes}},
    }  # fmt: skip
    source = calls_grammar(HERMES, [CITY], {}, many=False).source
    schema = json.loads(re.search(r"%json (.*)", source)[1])  # type: ignore[index]
    assert {key: schema[key] for key in CITY.parameters} == CITY.parameters
