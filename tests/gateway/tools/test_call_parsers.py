"""Tool calls in the format of each family: parsed at once, split at any point, and character by character."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gateway.tools.call_parsers import CallParser, HermesParser, JsonParser, Llama3Parser, MistralParser, Tools
from gateway.tools.pieces import CallArguments, CallBegin, Content, Piece, merged
from gateway.tools.section_parsers import DeepSeekParser, GraniteParser, Phi4MiniParser

KNOWN: Tools = {"get_weather": {}, "get_time": {}, "add": {}}
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome", "days": [1, 2, {"x": null}]}'
TRICKY = '{"city": "a } \\" ] </tool_call> { [ <|python_tag|> é 🌧 \\\\"}'
Expected = tuple[str, list[tuple[str, str]]]
"""The content, and the names and arguments of the calls."""


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


HERMES: list[tuple[str, Expected]] = [
    (hermes("get_weather", PARIS), ("", [("get_weather", PARIS)])),
    (hermes("get_weather", PARIS) + "\n" + hermes("add", ROME), ("", [("get_weather", PARIS), ("add", ROME)])),
    ("I will look.\n" + hermes("get_time", "{}"), ("I will look.\n", [("get_time", "{}")])),
    ("\n\n" + hermes("get_time", TRICKY) + "\n", ("", [("get_time", TRICKY)])),
    (hermes("get_time", "{}") + "\nThat is it.", ("\nThat is it.", [("get_time", "{}")])),
    (hermes("unknown", "{}"), ("", [("unknown", "{}")])),
    ('<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', ("", [("add", '{"a":1}')])),
    ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', ("", [("add", '{"a": 1}')])),
    ('<tool_call>{"id": 7, "x": [1], "name": "add", "arguments": {}, "y": "z"}</tool_call>', ("", [("add", "{}")])),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("add", '{"a": 1}')])),
    ('<tool_call>{"name": "add", "arguments": null}</tool_call>', ("", [("add", "{}")])),
    ('<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    ('<tool_call>{"name": "\\u00e9t\\u00e9", "arguments": {}}</tool_call>', ("", [("été", "{}")])),
    ('<tool_call>{"name": "add", "arguments": {}}\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
     ("", [("add", "{}"), ("add", '{"a": 2}')])),
    # cut off by max_tokens, before and after the call was recognized
    ('<tool_call>\n{"name": "get_w', ('<tool_call>\n{"name": "get_w', [])),
    ('<tool_call>\n{"name": "add", "arguments": {"a": "b', ("", [("add", '{"a": "b')])),
    ('<tool_call>\n{"name": "add", "arguments": {"a": 1}', ("", [("add", '{"a": 1}')])),
    ('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_', ("</tool_", [("add", "{}")])),
    # no calls
    ("Hello, world.", ("Hello, world.", [])),
    ("", ("", [])),
    (" \n ", (" \n ", [])),
    ("a < b <tool <tool_call", ("a < b <tool <tool_call", [])),
    ("<<tool_call>x", ("<<tool_call>x", [])),
    ("<tool_call>call add(1)</tool_call>", ("<tool_call>call add(1)</tool_call>", [])),
    ("<tool_call>[]</tool_call>", ("<tool_call>[]</tool_call>", [])),
    ("<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", [])),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>',
     ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', [])),
    ('<tool_call>{"name": "", "arguments": {}}</tool_call>',
     ('<tool_call>{"name": "", "arguments": {}}</tool_call>', [])),
    ("<tool_call><tool_call>" + hermes("add", "{}"), ("<tool_call><tool_call>", [("add", "{}")])),
    ("<tool_call>no " + hermes("add", "{}") + " end", ("<tool_call>no  end", [("add", "{}")])),
    # text after a call that is not a call is content
    ('<tool_call>{"name": "add", "arguments": {}}}</tool_call>', ("}</tool_call>", [("add", "{}")])),
]  # fmt: skip
LLAMA3: list[tuple[str, Expected]] = [
    (llama("get_weather", PARIS), ("", [("get_weather", PARIS)])),
    ("\n" + llama("get_weather", TRICKY) + "\n", ("", [("get_weather", TRICKY)])),
    ("<|python_tag|>" + llama("get_weather", PARIS), ("", [("get_weather", PARIS)])),
    ("<|python_tag|>" + llama("unknown", PARIS), ("", [("unknown", PARIS)])),
    (llama("add", "{}") + "; " + llama("get_time", ROME), ("", [("add", "{}"), ("get_time", ROME)])),
    (llama("add", "{}") + "\n" + llama("get_time", ROME), ("", [("add", "{}"), ("get_time", ROME)])),
    ('{"type": "function", "name": "add", "parameters": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    ('{"name": "add", "arguments": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    ('{"parameters": {"a": 1}, "name": "add"}', ("", [("add", '{"a": 1}')])),
    ('{"name": "add", "parameters": {"a": "', ("", [("add", '{"a": "')])),
    ("Here is it: " + llama("add", "{}") + " Would you like more?",
     ("Here is it: Would you like more?", [("add", "{}")])),
    ("if (a) {b = 1; {" + llama("add", ROME), ("if (a) {b = 1; {", [("add", ROME)])),
    ("In JSON: " + llama("Alice", "{}") + " {", ("In JSON: " + llama("Alice", "{}") + " {", [])),
    (llama("Alice", "{}"), (llama("Alice", "{}"), [])),
    ('{"name": "add"}', ('{"name": "add"}', [])),
    ('{"name": "add", "age": 5}', ('{"name": "add", "age": 5}', [])),
    ('{"name": "add", "parameters": 5}', ('{"name": "add", "parameters": 5}', [])),
    ('{"city": "Paris"}', ('{"city": "Paris"}', [])),
    ("<|python_tag|>brave_search.call(query=\"x\")", ("<|python_tag|>brave_search.call(query=\"x\")", [])),
    ("<|python_", ("<|python_", [])),
    ("{", ("{", [])),
    (llama("add", "{}") + "; and", ("; and", [("add", "{}")])),
    (llama("add", "{}") + ' {"x": 1}', ('{"x": 1}', [("add", "{}")])),
    ('{"name": "Bob", "parameters": ' + llama("add", "{}") + "}",
     ('{"name": "Bob", "parameters": }', [("add", "{}")])),
]  # fmt: skip
MISTRAL: list[tuple[str, Expected]] = [
    (f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', ("", [("get_weather", PARIS)])),
    (f'[TOOL_CALLS][{{"name": "add", "arguments": {TRICKY}}}, {{"name": "add", "arguments": {ROME}}}]',
     ("", [("add", TRICKY), ("add", ROME)])),
    ('[TOOL_CALLS] [{"arguments": {"a": 1}, "name": "add", "id": "abc123def"}]', ("", [("add", '{"a": 1}')])),
    ('[TOOL_CALLS] {"name": "add", "arguments": {"a": 1}}', ("", [("add", '{"a": 1}')])),
    (f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", ("", [("get_weather", PARIS)])),
    (f"[TOOL_CALLS]add[ARGS]{TRICKY}[TOOL_CALLS]get_time[ARGS]{{}}", ("", [("add", TRICKY), ("get_time", "{}")])),
    (f"[TOOL_CALLS]add[CALL_ID]abc123XYZ[ARGS]{ROME}", ("", [("add", ROME)])),
    ('[TOOL_CALLS]add{"a": 1}', ("", [("add", '{"a": 1}')])),
    ("Let me see.[TOOL_CALLS]add[ARGS]{}", ("Let me see.", [("add", "{}")])),
    ('[TOOL_CALLS]add[ARGS]{"a": [1', ("", [("add", '{"a": [1')])),
    ("[TOOL_CALLS]add[ARGS]{} Done.", (" Done.", [("add", "{}")])),
    ("[1, 2] is a list", ("[1, 2] is a list", [])),
    ("[[TOOL_CALLS", ("[[TOOL_CALLS", [])),
    ("[TOOL_CALLS]", ("[TOOL_CALLS]", [])),
    ("[TOOL_CALLS] []", ("[TOOL_CALLS] []", [])),
    ("[TOOL_CALLS]add[ARGS]5", ("[TOOL_CALLS]add[ARGS]5", [])),
    ("[TOOL_CALLS]add[ARG]{}", ("[TOOL_CALLS]add[ARG]{}", [])),
    ("[TOOL_CALLS]add nothing", ("[TOOL_CALLS]add nothing", [])),
    ('[TOOL_CALLS] [{"name": "add", "arguments": {}}, 5]', (", 5]", [("add", "{}")])),
]  # fmt: skip
JSON: list[tuple[str, Expected]] = [
    (f'{{"name": "get_weather", "arguments": {PARIS}}}', ("", [("get_weather", PARIS)])),
    (f' [{{"name": "add", "arguments": {TRICKY}}}, {{"name": "add", "parameters": {ROME}}}]\n',
     ("", [("add", TRICKY), ("add", ROME)])),
    ('[{"name": "add", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}]', ("", [("add", '{"a": "é"}')])),
    ('{"name": "other", "arguments": {}}', ('{"name": "other", "arguments": {}}', [])),
    ('{"name": "add", "arguments": [1]}', ('{"name": "add", "arguments": [1]}', [])),
    ("[1, 2, 3]", ("[1, 2, 3]", [])),
    ("[]", ("[]", [])),
    ("[", ("[", [])),
    ("It is 5.", ("It is 5.", [])),
    ('The call is {"name": "add", "arguments": {}}', ("The call is ", [("add", "{}")])),
    ('See [1]: [{"name": "add", "arguments": {}}], [2]', ("See [1]: , [2]", [("add", "{}")])),
    ("[[{", ("[[{", [])),
]  # fmt: skip
OPEN, CLOSE = DeepSeekParser.OPEN, DeepSeekParser.CLOSE


def deepseek(name: str, arguments: str) -> str:
    call = f"function{DeepSeekParser.SEP}{name}\n```json\n{arguments}\n```"
    return f"{DeepSeekParser.CALL}{call}{DeepSeekParser.CALL_END}"


def deepseek_v31(name: str, arguments: str) -> str:
    return f"{DeepSeekParser.CALL}{name}{DeepSeekParser.SEP}{arguments}{DeepSeekParser.CALL_END}"


DEEPSEEK: list[tuple[str, Expected]] = [
    (OPEN + deepseek("get_weather", PARIS) + CLOSE, ("", [("get_weather", PARIS)])),
    (OPEN + deepseek("get_weather", TRICKY) + "\n" + deepseek("add", ROME) + CLOSE,
     ("", [("get_weather", TRICKY), ("add", ROME)])),
    ("I will look.\n" + OPEN + deepseek_v31("get_time", "{}") + CLOSE, ("I will look.\n", [("get_time", "{}")])),
    (OPEN + deepseek_v31("get_time", "{}") + deepseek_v31("unknown", TRICKY) + CLOSE,
     ("", [("get_time", "{}"), ("unknown", TRICKY)])),
    (OPEN + "\n" + deepseek_v31("function", "{}") + CLOSE + " Done.", (" Done.", [("function", "{}")])),
    # cut off by max_tokens, before and after the call was certain
    (OPEN + deepseek("get_weather", PARIS)[:40], (OPEN + deepseek("get_weather", PARIS)[:40], [])),
    (OPEN + f'{DeepSeekParser.CALL}add{DeepSeekParser.SEP}{{"a": "b', ("", [("add", '{"a": "b')])),
    (OPEN + deepseek_v31("add", "{}")[:-3], (DeepSeekParser.CALL_END[:-3], [("add", "{}")])),
    # no calls
    (OPEN, (OPEN, [])),
    (OPEN + CLOSE, (OPEN + CLOSE, [])),
    (OPEN + deepseek_v31("add", "5"), (OPEN + deepseek_v31("add", "5"), [])),
    (OPEN + deepseek_v31("", "{}"), (OPEN + deepseek_v31("", "{}"), [])),
    ("a < b <\uff5ctool", ("a < b <\uff5ctool", [])),
    # what does not fit after a call is content
    (OPEN + deepseek_v31("add", "{}") + "<\uff5ctool\u2581calls!", ("<\uff5ctool\u2581calls!", [("add", "{}")])),
    (OPEN + deepseek_v31("add", "{}") + DeepSeekParser.CALL + "x", (DeepSeekParser.CALL + "x", [("add", "{}")])),
]  # fmt: skip
GRANITE: list[tuple[str, Expected]] = [
    (f'<|tool_call|>[{{"name": "add", "arguments": {TRICKY}}}, {{"name": "x", "arguments": {ROME}}}]',
     ("", [("add", TRICKY), ("x", ROME)])),
    ('Look.<|tool_call|> {"name": "add", "arguments": {}}', ("Look.", [("add", "{}")])),
    ("<|tool_call|>[]", ("<|tool_call|>[]", [])),
    ("<|tool_call|>none", ("<|tool_call|>none", [])),
    ("<|tool_call", ("<|tool_call", [])),
]  # fmt: skip
PHI4_MINI: list[tuple[str, Expected]] = [
    (f'functools[{{"name": "add", "arguments": {PARIS}}}]', ("", [("add", PARIS)])),
    (f'functools[{{"name": "add", "arguments": {PARIS}}}, {{"name": "add", "arguments": {TRICKY}}}]',
     ("", [("add", PARIS), ("add", TRICKY)])),
    ("from functools import partial", ("from functools import partial", [])),
    ("for func func", ("for func func", [])),
]  # fmt: skip
FAMILIES: list[tuple[type[CallParser], list[tuple[str, Expected]]]] = [
    (HermesParser, HERMES), (Llama3Parser, LLAMA3), (MistralParser, MISTRAL), (JsonParser, JSON),
    (DeepSeekParser, DEEPSEEK), (GraniteParser, GRANITE), (Phi4MiniParser, PHI4_MINI),
]  # fmt: skip
TABLE = [pytest.param(kind, text, expected, id=text[:60]) for kind, rows in FAMILIES for text, expected in rows]


def read(kind: type[CallParser], parts: Sequence[str], max_calls: int | None = None) -> list[Piece]:
    parser = kind(KNOWN, max_calls)
    return merged([piece for part in parts for piece in parser.feed(part)] + parser.finish())


def result(pieces: Sequence[Piece]) -> Expected:
    content = "".join(p.text for p in pieces if isinstance(p, Content))
    begun = [p for p in pieces if isinstance(p, CallBegin)]
    assert [p.index for p in begun] == list(range(len(begun)))
    arguments = ["".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == b.index) for b in begun]
    return content, [(b.name, text) for b, text in zip(begun, arguments, strict=True)]


@pytest.mark.parametrize(("kind", "text", "expected"), TABLE)
def test_every_cut_gives_the_same(kind: type[CallParser], text: str, expected: Expected) -> None:
    whole = read(kind, [text])
    assert result(whole) == expected
    for cut in range(len(text) + 1):
        assert read(kind, [text[:cut], text[cut:]]) == whole, cut
    assert read(kind, list(text)) == whole


@pytest.mark.parametrize(("kind", "rows"), FAMILIES, ids=lambda value: getattr(value, "__name__", ""))
def test_any_mixture_of_outputs_loses_nothing(kind: type[CallParser], rows: list[tuple[str, Expected]]) -> None:
    """Fragments of the table in any order, split anywhere, give the same parts. No character of the text is lost,
    except for names and keys of calls."""
    rng = random.Random(5)
    for _ in range(150):
        texts = [rng.choice(rows)[0] for _ in range(3)]
        text = "".join(t[rng.randrange(len(t) + 1) // 3 :][: rng.randrange(90)] for t in texts)
        whole = read(kind, [text])
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(4))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(kind, parts) == whole and read(kind, list(text)) == whole, text
        if not any(isinstance(p, CallBegin) for p in whole):
            assert result(whole)[0] == text


def test_arguments_arrive_while_they_are_written() -> None:
    parser = HermesParser(KNOWN)
    begun = parser.feed('<tool_call>{"name": "add", "arguments": {')
    assert begun == [CallBegin(0, "add"), CallArguments(0, "{")]
    assert parser.feed('"a": ') == [CallArguments(0, '"a": ')]
    assert parser.feed("1}") == [CallArguments(0, "1}")] and parser.feed("}</tool_call>") == []


def test_content_is_not_held_back() -> None:
    for kind in (HermesParser, Llama3Parser, MistralParser, JsonParser):
        parser = kind(KNOWN)
        assert parser.feed("The") == [Content("The")] and parser.feed(" wolf") == [Content(" wolf")]


def test_at_most_so_many_calls_are_passed_on() -> None:
    text = "Hm. " + hermes("add", PARIS) + hermes("get_time", ROME) + " so"
    assert result(read(HermesParser, [text], 1)) == ("Hm.  so", [("add", PARIS)])
    assert read(HermesParser, list(text), 1) == read(HermesParser, [text], 1)


@pytest.mark.parametrize("kind", [kind for kind, _ in FAMILIES])
@pytest.mark.parametrize(
    "evil",
    [
        '{"name":"',
        '{"arguments":[',
        '[{"id":{',
        "[TOOL_CALLS]f[CALL_ID]",
        OPEN,
        OPEN + deepseek_v31("f", "{}"),
        OPEN + DeepSeekParser.CALL + "f",
        '<tool_call>{"a":"',
        '<tool_call>{"a":[',
        "<tool_call>",
        '<tool_call>{"name":"f","arguments":{',
        " ",
        "<",
    ],
    ids=repr,
)
def test_the_cost_is_linear_whatever_is_written(kind: type[CallParser], evil: str) -> None:
    def took(size: int) -> float:
        text = (evil * size)[:size]
        began = time.process_time()
        parser = kind(KNOWN)
        for at in range(0, size, 4):
            parser.feed(text[at : at + 4])
        parser.finish()
        return time.process_time() - began

    tries = (took(160_000) < 30 * max(took(20_000), 0.005) for _ in range(3))
    assert any(tries), "8 times the text, about 8 times the work"


def test_arguments_that_are_json_stay_as_they_were() -> None:
    rng = random.Random(3)

    def value(depth: int) -> Any:
        kind = rng.randrange(6 if depth else 4)
        if kind < 4:
            return [rng.random(), None, rng.choice(["", "{", "}", '"', "\\", "é\n", "[TOOL_CALLS]"]), True][kind]
        if kind == 4:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        return {rng.choice('abc}]"'): value(depth - 1) for _ in range(rng.randrange(4))}

    for _ in range(100):
        arguments = json.dumps({"x": value(4)}, ensure_ascii=rng.random() < 0.5)
        for kind, text in (
            (HermesParser, hermes("add", arguments)),
            (Llama3Parser, llama("add", arguments)),
            (MistralParser, f"[TOOL_CALLS]add[ARGS]{arguments}"),
            (JsonParser, f'[{{"name": "add", "arguments": {arguments}}}]'),
        ):
            assert result(read(kind, list(text))) == ("", [("add", arguments)])
