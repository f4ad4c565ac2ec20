"""Reasoning that is split off at any point, and calls after it."""

from __future__ import annotations

import pytest

from gateway.tools.call_parsers import merged
from gateway.tools.enforce import thinking_before
from gateway.tools.known_formats import HERMES
from gateway.tools.output_reader import OutputReader
from gateway.tools.pieces import CallArguments, CallBegin, Reasoning
from gateway.tools.reasoning import ReasoningSplitter, begins_inside

REASONING: list[tuple[bool, str, str, str]] = [
    (False, "<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "\n\nYes."),
    (False, "\n<think>a</think>b", "a", "b"),
    (False, "<think>cut off </thi", "cut off </thi", ""),
    (False, "No tags.", "", "No tags."),
    (False, "", "", ""),
    (False, "<thin", "", "<thin"),
    (False, "A <think>later</think>", "", "A <think>later</think>"),
    (False, "<think></think>x", "", "x"),
    (False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    (True, "Hm.\n</think>\n\nYes.", "Hm.\n", "\n\nYes."),
    (True, "<think>\nHm.</think>Yes.", "\nHm.", "Yes."),
    (True, "never ends", "never ends", ""),
    (True, "a < b </ c </think>d", "a < b </ c ", "d"),
    (True, " \n", " \n", ""),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), REASONING)
def test_reasoning_is_split_off_in_every_cut(inside: bool, text: str, reasoning: str, content: str) -> None:
    for parts in ([text], list(text), *([text[:n], text[n:]] for n in range(len(text)))):
        splitter = ReasoningSplitter(inside=inside)
        found = [*map(splitter.feed, parts), splitter.finish()]
        assert ("".join(r for r, _ in found), "".join(c for _, c in found)) == (reasoning, content), parts


def test_where_the_output_begins_depends_on_the_prompt() -> None:
    assert begins_inside("qwen3", "<|im_start|>assistant\n<think>\n")
    assert not begins_inside("qwen3", "<|im_start|>assistant\n") and begins_inside("deepseek_r1", "<|Assistant|>")
    assert not begins_inside("deepseek_r1", "<think>\n\n</think>\n\n")
    for parser in ("qwen3", "deepseek_r1"):
        assert begins_inside(parser, "", "<think>Hm") and not begins_inside(parser, "<think>", "The answer")
        assert not begins_inside(parser, "", "<think>a</think>b")
    assert thinking_before("deepseek_r1", "", "The answer") == "" and thinking_before("qwen3", "", "<think>") == "open"
    assert thinking_before(None, "") == "" and thinking_before("qwen3", "x</think>\n\n") == ""
    assert thinking_before("qwen3", "x") == "optional" and thinking_before("deepseek_r1", "x") == "open"


def test_calls_are_read_after_the_reasoning_only() -> None:
    text = '<think>use <tool_call>{"name": "f"}</tool_call>?</think>\n<tool_call>{"name": "f"}</tool_call>'
    for parts in ([text], list(text)):
        reader = OutputReader(ReasoningSplitter(inside=False), HERMES.parser({"f": {}}, None))
        pieces = merged([p for part in parts for p in reader.feed(part)] + reader.finish())
        assert pieces == [
            Reasoning('use <tool_call>{"name": "f"}</tool_call>?'), CallBegin(0, "f"), CallArguments(0, "{}"),
        ]  # fmt: skip
        assert reader.has_calls
