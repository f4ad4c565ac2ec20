"""Finds tool calls in the formats of FunctionGemma and Gemma 4, in which keys have no quotation marks and texts are
between two marks.
"""

from __future__ import annotations

from gateway.tools.call_object import END, NotACall, Scan, expect, skip_space
from gateway.tools.call_parsers import CallParser
from gateway.tools.literals import literal, quoted_notation


class GemmaParser(CallParser):
    """A parser of `<|tool_call>call:name{key:<|"|>text<|"|>,number:1}<tool_call|>` (Gemma 4)."""

    triggers = frozenset("<")
    OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
    PREFIX = "call:"

    def _marked(self, ch: str) -> Scan:
        return (yield from self._after(ch, self.OPEN, self._call))

    def _call(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        ch = yield from expect(ch, self.PREFIX)
        ch = yield from skip_space(ch)
        name: list[str] = []
        while ch.isalnum() or (ch != END and ch in "_.:/-"):
            name.append(ch)
            ch = yield
        ch = yield from skip_space(ch)
        if ch != "{" or not name:
            raise NotACall
        self.begin("".join(name))
        ch = yield from literal(ch, self.arguments, quoted_notation(self.QUOTE))
        ch = yield from skip_space(ch)
        _, ch = yield from self._matches(ch, self.CLOSE)
        return ch


class FunctionGemmaParser(GemmaParser):
    """A parser of `<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>` (FunctionGemma)."""

    OPEN, CLOSE, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
