"""Finds tool calls in the formats of DeepSeek V3, Kimi K2, Granite 3, Phi-4-mini, Hunyuan, Jamba, Command A and
InternLM 2 and 3, which write JSON after a marker or between markers.
"""

from __future__ import annotations

import re
from abc import abstractmethod

from gateway.tools.call_object import END, NotACall, Scan, container, expect, skip_space
from gateway.tools.call_parsers import CallParser


class SectionParser(CallParser):
    """The base class of parsers of a section between two markers, with a marker before each call."""

    triggers = frozenset("<")
    OPEN: str
    CLOSE: str
    CALL: str

    def _marked(self, ch: str) -> Scan:
        return (yield from self._after(ch, self.OPEN, self._calls))

    def _calls(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        ch = yield from expect(ch, self.CALL)
        while True:
            ch = yield from self._call(ch)
            ch = yield from skip_space(ch)
            mark, ch = yield from self._one_of(ch, (self.CALL, self.CLOSE))
            if mark != self.CALL:
                return ch
            self._held = [mark, ch]

    @abstractmethod
    def _call(self, ch: str) -> Scan:
        """Reads one call, from the end of its first marker."""


class DeepSeekParser(SectionParser):
    """A parser of calls of DeepSeek V3 and R1 (arguments in a code block), and V3.1 (plain arguments).

    V3 writes `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line break, a block of JSON,
    and `<｜tool▁call▁end｜><｜tool▁calls▁end｜>`. V3.1 writes `name<｜tool▁sep｜>{...}` within a call.
    """

    OPEN, CLOSE = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
    CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    SEP = "<\uff5ctool\u2581sep\uff5c>"
    KIND, CODE, CODE_END = "function", "```json", "```"

    def _call(self, ch: str) -> Scan:
        name: list[str] = []
        ch = yield from _until(ch, "<", name)
        ch = yield from expect(ch, self.SEP)
        in_code = ch != "{" and "".join(name) == self.KIND
        if in_code:
            name.clear()
            ch = yield from _until(ch, "\n", name)
            ch = yield from skip_space(ch)
            ch = yield from expect(ch, self.CODE)
            ch = yield from skip_space(ch)
        if ch != "{" or not (called := "".join(name).strip()):
            raise NotACall
        self.begin(called)
        ch = yield from container(ch, self.arguments)
        ch = yield from skip_space(ch)
        if in_code:
            _, ch = yield from self._matches(ch, self.CODE_END)
            ch = yield from skip_space(ch)
        _, ch = yield from self._matches(ch, self.CALL_END)
        return ch


class KimiParser(SectionParser):
    """A parser of `<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}
    <|tool_call_end|><|tool_calls_section_end|>` (Kimi K2).

    The text before the arguments is the call's id. It contains the name, and must appear unchanged in later messages of
    the chat. A bare number is accepted if there is only one tool.
    """

    OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    CALL, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
    ARGUMENTS = "<|tool_call_argument_begin|>"
    PREFIX = "functions."

    def _call(self, ch: str) -> Scan:
        read: list[str] = []
        ch = yield from _until(ch, "<", read)
        call_id = "".join(read).strip()
        name = self._name(call_id)
        ch = yield from expect(ch, self.ARGUMENTS)
        ch = yield from skip_space(ch)
        if ch != "{" or not name:
            raise NotACall
        self.begin(name, call_id)
        ch = yield from container(ch, self.arguments)
        ch = yield from skip_space(ch)
        _, ch = yield from self._matches(ch, self.CALL_END)
        return ch

    def _name(self, call_id: str) -> str:
        if match := re.fullmatch(r"(.+):\s*\d+", call_id):
            return match[1].removeprefix(self.PREFIX)
        if call_id.isdigit() and len(self._known) == 1:
            return next(iter(self._known))
        return call_id if call_id in self._known else ""


class ListParser(CallParser):
    """The base class of parsers of a marker followed by `{"name": ..., "arguments": {...}}` or a list of such
    objects.
    """

    MARK: str
    CLOSE = ""
    """The marker after the calls, or "" if the format has none."""

    def _marked(self, ch: str) -> Scan:
        return (yield from self._after(ch, self.MARK, self._calls))

    def _calls(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        ch = yield from self._list(ch, None) if ch == "[" else self._objects(ch, "", None)
        if not self.CLOSE:
            return ch
        ch = yield from skip_space(ch)
        _, ch = yield from self._matches(ch, self.CLOSE)
        return ch


class GraniteParser(ListParser):
    """A parser of `<|tool_call|>[{"name": ..., "arguments": {...}}]` (Granite 3)."""

    triggers = frozenset("<")
    MARK = "<|tool_call|>"


class Phi4MiniParser(ListParser):
    """A parser of `functools[{"name": ..., "arguments": {...}}]` (Phi-4-mini)."""

    triggers = frozenset("f")
    MARK = "functools"


class HunyuanParser(ListParser):
    """A parser of `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>` (Hunyuan A13B, Jamba)."""

    triggers = frozenset("<")
    MARK, CLOSE = "<tool_calls>", "</tool_calls>"


class CohereParser(ListParser):
    """A parser of `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`
    (Command A, Command R7B). The numbers in `tool_call_id` start over in each answer, so they do not become ids.
    """

    triggers = frozenset("<")
    MARK, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"


class InternLmParser(ListParser):
    """A parser of `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>` (InternLM 2 and 3)."""

    triggers = frozenset("<")
    START, PLUGIN = "<|action_start|>", "<|plugin|>"
    MARK, CLOSE = START + PLUGIN, "<|action_end|>"


def _until(ch: str, end: str, into: list[str]) -> Scan:
    """Appends the text up to `end`, a line break or the end of the text to `into`."""
    while ch not in (end, END, "\n"):
        into.append(ch)
        ch = yield
    return ch
