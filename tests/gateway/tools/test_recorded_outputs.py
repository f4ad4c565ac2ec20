"""Outputs of each family, as its model card or chat template documents them, with the calls that vLLM finds in them.

The cases are ours. The facts come from the chat templates and from vLLM's published tests of its parsers
(tests/tool_parsers/test_{kimi_k2,qwen3coder,glm4_moe,minimax_m2,pythonic,llama4_pythonic,olmo3,hunyuan_a13b,
internlm2,jamba}_tool_parser.py); for gpt-oss, Gemma and DeepSeek V3.2, they come from the parsers' own documentation.
Where Looseleaf differs, a comment says so.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.tools.call_format import CallFormat
from gateway.tools.call_parsers import Tools, merged
from gateway.tools.known_formats import (
    COHERE,
    DEEPSEEK_V32,
    FUNCTION_GEMMA,
    GEMMA4,
    GLM45,
    HARMONY,
    HUNYUAN,
    INTERNLM,
    KIMI_K2,
    LFM2,
    LLAMA4,
    LLAMA4_PYTHONIC,
    MINIMAX_M2,
    OLMO3,
    PYTHONIC,
    QWEN3_CODER,
    SEED_OSS,
)
from gateway.tools.pieces import CallArguments, CallBegin, Content, Piece, Reasoning

TOOLS: Tools = {
    "get_weather": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["celsius", "fahrenheit"]}}},
    "set_types": {"type": "object", "$defs": {"Point": {"type": "object"}}, "properties": {
        "i": {"type": "integer"}, "f": {"type": "number"}, "b": {"type": "boolean"}, "s": {"type": "string"},
        "o": {"type": "object"}, "a": {"type": "array"}, "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "r": {"$ref": "#/$defs/Point"}, "u": {"type": ["integer", "string"]}}},
    "now": {"type": "object", "properties": {}},
}  # fmt: skip
Calls = list[tuple[str, dict[str, Any]]]
Row = tuple[str, str, Calls]
"""The output, its content, and its calls. The arguments of a call that was cut off are text."""
PARIS = {"city": "Paris"}


def kimi(number: int, name: str, arguments: str, prefix: str = "functions.") -> str:
    call_id = f"{prefix}{name}:{number}"
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*calls: str) -> str:
    return "<|tool_calls_section_begin|>" + "".join(calls) + "<|tool_calls_section_end|>"


KIMI: list[Row] = [
    ("I'll check. " + section(kimi(0, "get_weather", '{"city": "Paris"}')), "I'll check. ", [("get_weather", PARIS)]),
    (section(kimi(0, "get_weather", '{"city": "Paris"}'), kimi(1, "now", "{}")), "",
     [("get_weather", PARIS), ("now", {})]),
    (section(kimi(3, "get_weather", '{\n  "city": "北京 <b>"\n}', prefix="")), "",
     [("get_weather", {"city": "北京 <b>"})]),
    (section(kimi(0, "now", "{} ").replace("now:0", "now:0 ")), "", [("now", {})]),
    (section(kimi(0, "now", "{}").replace("functions.now:0", "functions.now: 0")), "", [("now", {})]),
    (section(kimi(0, "x.y", '{"a": {"b": [1, {"c": "}"}]}}')), "", [("x.y", {"a": {"b": [1, {"c": "}"}]}})]),
    # An id without a number is not a call. vLLM drops it; here it stays in the content.
    (section(kimi(0, "now", "{}").replace(":0", "")), section(kimi(0, "now", "{}").replace(":0", "")), []),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>", []),
    ("a < b <|tool", "a < b <|tool", []),
]  # fmt: skip


def qwen(name: str, **arguments: str) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


CODE = "def f(x):\n    return x < 5 and \"</a>\"\n\n\tprint('é 🌧 \\n')\n"
TYPED: dict[str, str] = {
    "i": "42", "f": "3.14", "b": "True", "s": "007", "o": '{"k": {"v": [1,\n null]}}', "a": "[1, 2]", "n": "null",
    "r": '{"x": 1}', "u": "5",
}  # fmt: skip
VALUES = {"i": 42, "f": 3.14, "b": True, "s": "007", "o": {"k": {"v": [1, None]}}, "a": [1, 2], "n": None,
          "r": {"x": 1}, "u": 5}  # fmt: skip
"""vLLM returns `r` as text, because it does not follow references."""
QWEN: list[Row] = [
    (qwen("get_weather", city="Paris"), "", [("get_weather", PARIS)]),
    ("Sure! " + qwen("get_weather", city="Paris", days="2"), "Sure! ", [("get_weather", PARIS | {"days": 2})]),
    (qwen("set_types", **TYPED), "", [("set_types", VALUES)]),
    (qwen("set_types", s=CODE), "", [("set_types", {"s": CODE})]),
    (qwen("set_types", s="", n="none at all"), "", [("set_types", {"s": "", "n": "none at all"})]),
    (qwen("set_types", i="many", f="2.0", b="0", u="a"), "",
     [("set_types", {"i": "many", "f": 2, "b": False, "u": "a"})]),
    (qwen("now") + "\n" + qwen("get_weather", city="Paris"), "", [("now", {}), ("get_weather", PARIS)]),
    (qwen("other", x="1"), "", [("other", {"x": "1"})]),
    ("<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>", "", [("get_weather", PARIS)]),
    ("<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</tool_call>", "",
     [("get_weather", PARIS)]),
    ("Use <function=other> here", "Use <function=other> here", []),
    ("<tool_call>\n<function=now", "<tool_call>\n<function=now", []),
    ("<tool_call>\nnow()\n</tool_call>", "<tool_call>\nnow()\n</tool_call>", []),
]  # fmt: skip
SEED: list[Row] = [
    ("Hm.<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
     "</function>\n</seed:tool_call>", "Hm.", [("get_weather", PARIS | {"days": 3})]),
]  # fmt: skip


def glm(name: str, line_break: str = "\n", **arguments: str) -> str:
    pairs = [f"<arg_key>{k}</arg_key>{line_break}<arg_value>{v}</arg_value>{line_break}" for k, v in arguments.items()]
    return f"<tool_call>{name}{line_break}{''.join(pairs)}</tool_call>"


GLM: list[Row] = [
    (glm("get_weather", city="Paris"), "", [("get_weather", PARIS)]),
    (glm("get_weather", "", city="Paris", days="2"), "", [("get_weather", PARIS | {"days": 2})]),
    (glm("get_weather", "\n    ", city="Paris"), "", [("get_weather", PARIS)]),
    ("查天气。" + glm("get_weather", city="北京") + "\n" + glm("now"), "查天气。",
     [("get_weather", {"city": "北京"}), ("now", {})]),
    (glm("set_types", **TYPED), "", [("set_types", VALUES)]),
    (glm("set_types", s=CODE), "", [("set_types", {"s": CODE})]),
    # Text between calls is kept. vLLM drops it.
    (glm("now") + "\nand " + glm("now"), "\nand ", [("now", {}), ("now", {})]),
    ("<tool_call>now", "<tool_call>now", []),
    ("<tool_call>a call to now()</tool_call>", "<tool_call>a call to now()</tool_call>", []),
]  # fmt: skip


def minimax(*calls: tuple[str, dict[str, str]]) -> str:
    lines = []
    for name, arguments in calls:
        pairs = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items())
        lines.append(f'<invoke name="{name}">\n{pairs}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(lines)}</minimax:tool_call>"


MINIMAX: list[Row] = [
    ("Let me check. " + minimax(("get_weather", {"city": "Paris"})), "Let me check. ", [("get_weather", PARIS)]),
    (minimax(("get_weather", {"city": "Paris", "days": "5"}), ("now", {})), "",
     [("get_weather", PARIS | {"days": 5}), ("now", {})]),
    (minimax(("set_types", TYPED)), "", [("set_types", VALUES)]),
    ("<minimax:tool_call><invoke name=now>", "<minimax:tool_call><invoke name=now>", []),
]  # fmt: skip
PYTHON_ARGUMENTS = (
    "i=37, f=-1.5e3, b=True, s='John \\'J\\' \\\"D\\\"\\n\\u00e9', o={'city': \"LA\", 'x': {'y': [None, False, (1,)]}"
    "}, a=['John', 'J\\d'], n=None"
)
PYTHON_VALUES = {"i": 37, "f": -1500.0, "b": True, "s": 'John \'J\' "D"\né',
                 "o": {"city": "LA", "x": {"y": [None, False, [1]]}},
                 "a": ["John", "J\\d"], "n": None}  # fmt: skip
PYTHON: list[Row] = [
    ("[get_weather(city='Paris')]", "", [("get_weather", PARIS)]),
    (f"[set_types({PYTHON_ARGUMENTS})]", "", [("set_types", PYTHON_VALUES)]),
    ("[get_weather(city='Paris',days=2),now()]", "", [("get_weather", PARIS | {"days": 2}), ("now", {})]),
    ("[set_types(o={}), set_types(a=[])]", "", [("set_types", {"o": {}}), ("set_types", {"a": []})]),
    ('[ get_weather( city = "Paris" , days = 2 , ) ]', "", [("get_weather", PARIS | {"days": 2})]),
    ("[set_types(o={'b': true, 'n': null,}, a=[1, 2, ])]", "",
     [("set_types", {"o": {"b": True, "n": None}, "a": [1, 2]})]),
    ("<|python_start|>[get_weather(city='Paris')]<|python_end|>", "", [("get_weather", PARIS)]),
    # vLLM expects nothing before the list; a list after other text is a call here if it calls a tool.
    ("I look. [get_weather(city='Paris')]", "I look. ", [("get_weather", PARIS)]),
    ("See [1] and [x(y=1)].", "See [1] and [x(y=1)].", []),
    ("[get_weather(city=Paris)]", "[get_weather(city=Paris)]", []),
    ("[set_types(f=1e999)]", "[set_types(f=1e999)]", []),
    ("[set_types(s=b'z')]", "[set_types(s=b'z')]", []),
    ("[get_weather(", "[get_weather(", []),
]  # fmt: skip
OLMO: list[Row] = [
    ("<function_calls>get_weather(city='Paris')\nnow()</function_calls>", "", [("get_weather", PARIS), ("now", {})]),
    (f"<function_calls>\nset_types({PYTHON_ARGUMENTS})\n</function_calls>", "", [("set_types", PYTHON_VALUES)]),
    ("Hm. <function_calls>other()</function_calls>", "Hm. <function_calls>other()</function_calls>", []),
]  # fmt: skip
LFM: list[Row] = [
    ('<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Checking.', "Checking.", [("get_weather", PARIS)]),
]  # fmt: skip
LLAMA: list[Row] = [
    ('{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [("get_weather", PARIS)]),
    ('<|python_start|>{"name": "x", "parameters": {"a": "}"}}<|python_end|>', "", [("x", {"a": "}"})]),
]  # fmt: skip
LISTED = '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]'
TOOL_CALLS: list[Row] = [
    (f"I call. <tool_calls>{LISTED}</tool_calls>", "I call. ", [("get_weather", PARIS), ("now", {})]),
    ('<tool_calls>[\n    {"name": "x", "arguments": {"a": {"b": {"c": 1}}}}\n]</tool_calls>', "",
     [("x", {"a": {"b": {"c": 1}}})]),
    ("<tool_calls>[]</tool_calls>", "<tool_calls>[]</tool_calls>", []),
]  # fmt: skip
PLUGIN: list[Row] = [
    ('Yes.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n<|action_end|>', "Yes.",
     [("get_weather", PARIS)]),
    ("<|action_start|><|interpreter|>1", "<|action_start|><|interpreter|>1", []),
]  # fmt: skip
CALL = "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
OPENAI: list[Row] = [
    ("<|channel|>final<|message|>Hello < there", "Hello < there", []),
    ("<|channel|>analysis<|message|>The user greets.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
     "Hi", []),
    (f'<|channel|>analysis<|message|>Use a tool.<|end|>{CALL}{{"city": "Paris"}}<|call|>', "",
     [("get_weather", PARIS)]),
    ('<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}', "",
     [("get_weather", PARIS)]),
    ('<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Paris"}<|call|>', "",
     [("get_weather", PARIS)]),
    ('<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|> {"city": "Paris"}<|call|>', "",
     [("get_weather", PARIS)]),
    ("<|channel|>commentary to=functions.now<|message|>{}<|call|>", "", [("now", {})]),
    ("<|channel|>commentary to=functions.now<|message|><|call|>", "", [("now", {})]),
    (f'<|channel|>commentary<|message|>I look it up.<|end|>{CALL}{{"city": "<|paris"}}<|call|>', "I look it up.",
     [("get_weather", {"city": "<|paris"})]),
    # vLLM reads two calls in one answer, although the model stops after one.
    (f'{CALL}{{"city": "Paris"}}<|call|>{CALL}{{"city": "Rome"}}<|call|>', "",
     [("get_weather", PARIS), ("get_weather", {"city": "Rome"})]),
    # Code for a built-in tool is part of the reasoning. vLLM drops it.
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "", []),
    ("Once upon <|a time", "Once upon <|a time", []),
]  # fmt: skip


def dsml(name: str, *arguments: tuple[str, str, str]) -> str:
    pairs = "".join(f'<|DSML|parameter name="{k}" string="{t}">{v}</|DSML|parameter>\n' for k, t, v in arguments)
    return f'<|DSML|invoke name="{name}">\n{pairs}</|DSML|invoke>\n'.replace("|DSML|", "\uff5cDSML\uff5c")


def dsml_calls(*calls: str) -> str:
    text = f"<|DSML|function_calls>\n{''.join(calls)}</|DSML|function_calls>"
    return text.replace("|DSML|", "\uff5cDSML\uff5c")


DSML: list[Row] = [
    ("好的。\n\n" + dsml_calls(dsml("get_weather", ("city", "true", "Paris"), ("days", "false", "2"))), "好的。\n\n",
     [("get_weather", PARIS | {"days": 2})]),
    (dsml_calls(dsml("now"), dsml("get_weather", ("city", "true", "杭州"))), "",
     [("now", {}), ("get_weather", {"city": "杭州"})]),
    (dsml_calls(dsml("set_types", *((k, "true" if k == "s" else "false", v) for k, v in TYPED.items()))), "",
     [("set_types", VALUES)]),
    (dsml_calls(dsml("set_types", ("s", "true", "007"), ("i", "true", "42"), ("x", "false", '{"k": [1]}'))), "",
     [("set_types", {"s": "007", "i": "42", "x": {"k": [1]}})]),
    (dsml_calls(dsml("set_types", ("s", "true", CODE))), "", [("set_types", {"s": CODE})]),
    ("<\uff5cDSML\uff5cfunction_calls>", "<\uff5cDSML\uff5cfunction_calls>", []),
]  # fmt: skip
ACTION = '[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}'
ACTIONS: list[Row] = [
    (f"<|START_ACTION|>{ACTION}\n]<|END_ACTION|>", "", [("get_weather", PARIS)]),
    (f'I will look.<|START_ACTION|>{ACTION},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]'
     "<|END_ACTION|>", "I will look.", [("get_weather", PARIS), ("now", {})]),
    ("<|START_ACTION|>none", "<|START_ACTION|>none", []),
]  # fmt: skip


def gemma(quote: str, before: str, after: str) -> list[Row]:
    def call(text: str) -> str:
        return f"{before}call:{text.replace('~', quote)}{after}"

    return [
        (call("get_weather{city:~Paris~}"), "", [("get_weather", PARIS)]),
        ("Sure. " + call("get_weather{city:~Paris~,days:2}"), "Sure. ", [("get_weather", PARIS | {"days": 2})]),
        (call("now{}") + call("get_weather{city:~San Francisco, {CA}~}"), "",
         [("now", {}), ("get_weather", {"city": "San Francisco, {CA}"})]),
        (call("set_types{i:42,f:3.5,b:true,s:~a \"b\" < \\n\n:}~,o:{k:{v:[1,null]},e:~~},a:[~x~,[],{}],n:None}"), "",
         [("set_types", {"i": 42, "f": 3.5, "b": True, "s": 'a "b" < \\n\n:}', "o": {"k": {"v": [1, None]}, "e": ""},
                         "a": ["x", [], {}], "n": None})]),
        (call("x.y-z{ ~k~ : false , other: some words }"), "", [("x.y-z", {"k": False, "other": "some words"})]),
        (call('get_weather{"city": "Par\\u0069s"}'), "", [("get_weather", PARIS)]),
        (f"{before}get_weather", f"{before}get_weather", []),
        (f"a < b {before[:-1]}", f"a < b {before[:-1]}", []),
    ]  # fmt: skip


FAMILIES: list[tuple[CallFormat, list[Row]]] = [
    (HARMONY, OPENAI), (DEEPSEEK_V32, DSML), (COHERE, ACTIONS),
    (GEMMA4, gemma('<|"|>', "<|tool_call>", "<tool_call|>")),
    (FUNCTION_GEMMA, gemma("<escape>", "<start_function_call>", "<end_function_call>")),
    (KIMI_K2, KIMI), (QWEN3_CODER, QWEN), (SEED_OSS, SEED), (GLM45, GLM), (MINIMAX_M2, MINIMAX), (PYTHONIC, PYTHON),
    (LLAMA4_PYTHONIC, PYTHON), (OLMO3, OLMO), (LFM2, LFM), (LLAMA4, LLAMA), (HUNYUAN, TOOL_CALLS), (INTERNLM, PLUGIN),
]  # fmt: skip
TABLE = [pytest.param(form, row, id=f"{form.name}-{row[0][:40]}") for form, rows in FAMILIES for row in rows]


def read(form: CallFormat, parts: Sequence[str]) -> list[Piece]:
    parser = form.parser(TOOLS, None)
    return merged([piece for part in parts for piece in parser.feed(part)] + parser.finish())


def found(pieces: Sequence[Piece]) -> tuple[str, list[tuple[str, str]]]:
    content = "".join(p.text for p in pieces if isinstance(p, Content))
    begun = [p for p in pieces if isinstance(p, CallBegin)]
    arguments = ["".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == b.index) for b in begun]
    return content, [(b.name, text) for b, text in zip(begun, arguments, strict=True)]


@pytest.mark.parametrize(("form", "row"), TABLE)
def test_calls_are_found_as_vllm_finds_them_in_every_cut(form: CallFormat, row: Row) -> None:
    text, content, calls = row
    whole = read(form, [text])
    told, named = found(whole)
    assert (told, [(name, json.loads(arguments)) for name, arguments in named]) == (content, calls)
    for cut in range(len(text) + 1):
        assert read(form, [text[:cut], text[cut:]]) == whole, cut
    assert read(form, list(text)) == whole


@pytest.mark.parametrize(("form", "row"), TABLE)
def test_an_output_that_is_cut_off_gives_the_beginning_of_the_same_calls(form: CallFormat, row: Row) -> None:
    text, _, calls = row
    for end in range(len(text)):
        whole = read(form, [text[:end]])
        assert read(form, list(text[:end])) == whole, end
        _, named = found(whole)
        assert [name for name, _ in named] == [name for name, _ in calls][: len(named)]
        for (_, arguments), (_, expected) in zip(named[:-1], calls, strict=False):
            assert json.loads(arguments) == expected


def test_fragments_in_any_order_give_the_same_in_every_cut() -> None:
    rng = random.Random(5)
    for form, rows in FAMILIES:
        for _ in range(60):
            texts = [rng.choice(rows)[0] for _ in range(3)]
            text = "".join(t[rng.randrange(len(t) + 1) // 3 :][: rng.randrange(90)] for t in texts)
            whole = read(form, [text])
            assert read(form, list(text)) == whole, (form.name, text)
            if form is not HARMONY and not any(isinstance(p, CallBegin) for p in whole):
                assert found(whole)[0] == text


def test_text_is_passed_on_while_it_is_written() -> None:
    for form, before in ((QWEN3_CODER, "<tool_call>\n<function=set_types>\n<parameter=s>\nab"),
                         (PYTHONIC, "[set_types(s='ab")):  # fmt: skip
        parser = form.parser(TOOLS, None)
        assert merged(parser.feed(before)) == [CallBegin(0, "set_types"), CallArguments(0, '{"s": "ab')]
        assert parser.feed("cd") == [CallArguments(0, "cd")]


def test_the_channel_analysis_is_reasoning() -> None:
    pieces = read(
        HARMONY, ["<|channel|>analysis<|message|>Hm", " <b>.<|end|><|start|>assistant<|channel|>final<|message|>Hi"]
    )
    assert pieces == [Reasoning("Hm <b>."), Content("Hi")]
    unasked = HARMONY.parser({}, 0)
    assert merged(unasked.feed(OPENAI[2][0]) + unasked.finish()) == [Reasoning("Use a tool.")]


def test_kimis_own_ids_are_kept() -> None:
    pieces = read(KIMI_K2, [section(kimi(4, "now", "{}"))])
    assert pieces[0] == CallBegin(0, "now", "functions.now:4")
    bare = KIMI_K2.parser({"now": {}}, None)
    assert merged(bare.feed(section(kimi(0, "now", "{}").replace("functions.now:", ""))))[0] == CallBegin(0, "now", "0")


EVIL = (
    "<tool_call>\n<function=now>\n<parameter=", "<tool_call><", "<tool_call>a", "<parameter=a>\n\n<", "[now(a=[",
    "[now(a='\\", "[now(a=1, ", "[now(), ", "[", "<|tool_call_begin|>", "{'a': ", "<|channel|>", "<|",
    "<|channel|>commentary to=functions.f<|message|>", "<|tool_call>call:f{a:[", "<|tool_call>call:f{a:<|\"|><|",
)  # fmt: skip


@pytest.mark.parametrize("evil", EVIL, ids=repr)
def test_the_cost_is_linear_whatever_is_written(evil: str) -> None:
    def took(form: CallFormat, size: int) -> float:
        text = ("<tool_call>\n<function=set_types>\n<parameter=o>\n" + evil * size)[:size]
        began = time.process_time()
        parser = form.parser(TOOLS, None)
        for at in range(0, size, 4):
            parser.feed(text[at : at + 4])
        parser.finish()
        return time.process_time() - began

    for form in (QWEN3_CODER, PYTHONIC, HARMONY, GEMMA4):
        tries = (took(form, 80_000) < 30 * max(took(form, 10_000), 0.005) for _ in range(3))
        assert any(tries), "8 times the text, about 8 times the work"
