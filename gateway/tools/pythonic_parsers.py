"""Finds tool calls that are written as Python, in the formats of Llama 3.2, Llama 4, LFM2 and Olmo 3.

Arguments are literals, which are passed on as JSON while the model writes them.
"""

from __future__ import annotations

import json

from gateway.tools.call_object import END, NotACall, Scan, expect, skip_space
from gateway.tools.call_parsers import CallParser
from gateway.tools.literals import PYTHON, literal


class PythonicParser(CallParser):
    """A parser of `[name(key='value', ...), ...]` (Llama 3.2, and Llama 4, which may write it between two markers).

    A list is read as calls only if it begins with a call of a known tool.
    """

    triggers = frozenset("<[")
    OPEN, CLOSE = "<|python_start|>", "<|python_end|>"
    SEPARATOR = ","

    def _marked(self, ch: str) -> Scan:
        if ch == "[":
            return (yield from self._begun("", ch, self._list_of_calls))
        return (yield from self._after(ch, self.OPEN, self._block))

    def _block(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        ch = yield from self._list_of_calls(ch)
        ch = yield from skip_space(ch)
        _, ch = yield from self._matches(ch, self.CLOSE)
        return ch

    def _list_of_calls(self, ch: str) -> Scan:
        ch = yield from expect(ch, "[")
        while True:
            ch = yield from skip_space(ch)
            ch = yield from self._call(ch)
            self._held = [ch]
            ch = yield from skip_space(ch)
            if ch != ",":
                return (yield from expect(ch, "]"))
            ch = yield

    def _call(self, ch: str) -> Scan:
        name: list[str] = []
        while ch.isalnum() or (ch != END and ch in "_.-"):
            name.append(ch)
            ch = yield
        if ch != "(" or "".join(name) not in self._known:
            raise NotACall
        arguments = _Arguments(self, "".join(name))
        ch = yield from skip_space((yield))
        while ch != ")":
            if self._held is None:
                self._held = [ch]
            ch = yield from arguments.read(ch)
            ch = yield from skip_space(ch)
            if ch == ",":
                ch = yield from skip_space((yield))
            elif ch != ")":
                raise NotACall
        arguments.end()
        return (yield)


class _Arguments:
    """A reader of one call's arguments. The parser passes on the call with the first part of an argument's value, or at
    the end of a call without arguments.
    """

    def __init__(self, parser: PythonicParser, name: str) -> None:
        self._parser = parser
        self._name = name
        self._has_begun = False
        self._key = ""
        """The key that was read last, as JSON, until the first part of its value."""

    def read(self, ch: str) -> Scan:
        """Reads `key=value`."""
        letters: list[str] = []
        while ch.isalnum() or ch == "_":
            letters.append(ch)
            ch = yield
        if not letters:
            raise NotACall
        ch = yield from skip_space(ch)
        ch = yield from expect(ch, "=")
        ch = yield from skip_space(ch)
        self._key = json.dumps("".join(letters), ensure_ascii=False) + ": "
        return (yield from literal(ch, self._take, PYTHON))

    def end(self) -> None:
        closer = "}" if self._has_begun else "{}"
        self._begin()
        self._parser.arguments(closer)

    def _take(self, text: str) -> None:
        if self._key:
            before = ", " if self._has_begun else "{"
            self._begin()
            self._parser.arguments(before + self._key)
            self._key = ""
        self._parser.arguments(text)

    def _begin(self) -> None:
        if not self._has_begun:
            self._parser.begin(self._name)
        self._has_begun = True


class Lfm2Parser(PythonicParser):
    """A parser of `<|tool_call_start|>[name(key="value"), ...]<|tool_call_end|>` (LFM2)."""

    OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


class Olmo3Parser(PythonicParser):
    """A parser of calls such as `name(key="value")`, one per line, between `<function_calls>` tags (Olmo 3)."""

    triggers = frozenset("<")
    OPEN, CLOSE = "<function_calls>", "</function_calls>"

    def _list_of_calls(self, ch: str) -> Scan:
        while True:
            ch = yield from self._call(ch)
            self._held = [ch]
            ch = yield from skip_space(ch)
            if ch == END or ch == "<":
                return ch
