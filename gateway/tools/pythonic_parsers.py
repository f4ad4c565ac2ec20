"""Finds tool calls that are written as Python, in the formats of Llama 3.2, Llama 4, LFM2 and Olmo 3.

Arguments are literals, which are passed on as JSON while the model writes them.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Mapping

from gateway.tools.call_object import END, NotACall, Scan, Take, expect, skip_space
from gateway.tools.call_parsers import CallParser

_CONSTANTS: Mapping[str, str] = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_HEX = frozenset(string.hexdigits)
_CLOSERS: Mapping[str, str] = {"[": "]", "(": ")", "{": "}"}
_ESCAPES: Mapping[str, str] = {
    "n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "v": "\\u000b", "a": "\\u0007", "0": "\\u0000",
    "\\": "\\\\", '"': '\\"', "'": "'", "/": "/", "\n": "",
}  # fmt: skip


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
    """A reader of one call's arguments. The call begins with its first readable argument."""

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
        return (yield from literal(ch, self._take))

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


def literal(ch: str, take: Take) -> Scan:
    """Reads a Python literal, or JSON, and passes it on as JSON. Raises NotACall before the first part that is neither.
    Tuples become lists. Literals that JSON cannot express, such as sets and bytes, also raise NotACall.
    """
    closers: list[str] = []
    while True:
        if ch in _CLOSERS:
            closers.append(_CLOSERS[ch])
            take("{" if ch == "{" else "[")
            ch = yield from skip_space((yield))
            if ch != closers[-1]:
                if closers[-1] == "}":
                    ch = yield from _key(ch, take)
                continue
        else:
            ch = yield from _scalar(ch, take)
        ch = yield from _closed(ch, closers, take)
        if not closers:
            return ch
        take(", ")
        if closers[-1] == "}":
            ch = yield from _key(ch, take)


def _closed(ch: str, closers: list[str], take: Take) -> Scan:
    """Reads the closing brackets and the comma after an item. Returns the first character of the next item, or the one
    after the literal.
    """
    while closers:
        ch = yield from skip_space(ch)
        if ch == ",":
            ch = yield from skip_space((yield))
            if ch != closers[-1]:
                return ch
        if ch != closers[-1]:
            raise NotACall
        take("}" if closers.pop() == "}" else "]")
        ch = yield
    return ch


def _key(ch: str, take: Take) -> Scan:
    """Reads a key of a dict, which must be a string, and its colon."""
    if ch not in ("'", '"'):
        raise NotACall
    ch = yield from _string(ch, take)
    ch = yield from skip_space(ch)
    ch = yield from expect(ch, ":")
    take(": ")
    return (yield from skip_space(ch))


def _scalar(ch: str, take: Take) -> Scan:
    """Reads a string, a number or a constant."""
    if ch in ("'", '"'):
        return (yield from _string(ch, take))
    letters: list[str] = []
    while ch != END and (ch.isalnum() or ch in "_+-."):
        letters.append(ch)
        ch = yield
    if ch == END:  # the end of the word may be missing
        raise NotACall
    word = "".join(letters)
    take(_CONSTANTS[word] if word in _CONSTANTS else _number(word))
    return ch


def _number(word: str) -> str:
    if re.fullmatch(r"-?(0|[1-9]\d{0,999})", word, re.ASCII):
        return word
    try:
        value = float(word)
    except ValueError:
        raise NotACall from None
    if not math.isfinite(value):
        raise NotACall
    return json.dumps(value)


def _string(quote: str, take: Take) -> Scan:
    """Reads a string, whose quotation mark is given."""
    take('"')
    ch = yield
    while ch != quote:
        if ch == END:
            raise NotACall
        if ch == "\\":
            ch = yield from _escape((yield), take)
            continue
        take(json.dumps(ch, ensure_ascii=False)[1:-1])
        ch = yield
    take('"')
    return (yield)


def _escape(ch: str, take: Take) -> Scan:
    """Reads an escape after its backslash. An escape that Python does not know keeps its backslash."""
    size = {"x": 2, "u": 4, "U": 8}.get(ch)
    if ch == END:
        raise NotACall
    if size is None:
        take(_ESCAPES.get(ch, "\\\\" + ch))
        return (yield)
    digits = ""
    while len(digits) < size:
        if (ch := (yield)) not in _HEX:
            raise NotACall
        digits += ch
    if int(digits, 16) > 0x10FFFF:
        raise NotACall
    take(f"\\u{int(digits, 16):04x}" if size < 8 else json.dumps(chr(int(digits, 16)))[1:-1])
    return (yield)
