"""Reads the JSON object of a tool call, `{"name": ..., "arguments": {...}}`, one character at a time.

The readers are generators. The caller sends them one character after another, and END after the last character. A
reader returns the first character after the part that it has read. NotACall means that the text has a different form.
The result therefore does not depend on how the text was split. Arguments that are an object are passed on as the model
wrote them. They end where their brackets balance, and need not be valid JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Generator, Sequence
from typing import Any, Protocol

END = ""
"""The text that is sent after the last character."""
SPACE = frozenset(" \t\r\n")
ARGUMENT_KEYS = frozenset(("arguments", "parameters"))
_NAME_KEYS = frozenset(("name", "tool_name"))
STRICT_KEYS = frozenset(("name", "type", "id")) | ARGUMENT_KEYS
"""The keys that an object without a marker may have. An object with any other key is data. `tool_name` is not among
them, because it occurs only in Command A's calls, which have a marker.
"""

Scan = Generator[None, str, str]
Take = Callable[[str], Any]


class NotACall(Exception):
    """The error for text that is not a call, or that ends before the call is complete."""


class CallSink(Protocol):
    """The interface of an object that receives a call while the call is read."""

    def begin(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...


def skip_space(ch: str) -> Scan:
    while ch in SPACE:
        ch = yield
    return ch


def read_among(ch: str, marks: Sequence[str]) -> Generator[None, str, tuple[str, str]]:
    """Reads one of several markers, none of which begins another marker. Returns the text that was read and the next
    character. If other text follows, the returned text is only the beginning of a marker.
    """
    read = ""
    while read not in marks and ch != END and any(mark.startswith(read + ch) for mark in marks):
        read += ch
        ch = yield
    return read, ch


def expect(ch: str, mark: str) -> Scan:
    """Reads a marker. Raises NotACall for any other text."""
    for expected in mark:
        if ch != expected:
            raise NotACall
        ch = yield
    return ch


def container(ch: str, take: Take) -> Scan:
    """Reads an object or a list, and passes each of its characters to `take`. `ch` is the opening bracket."""
    depth, in_string, escaped = 0, False, False
    while ch != END:
        take(ch)
        if in_string:
            in_string = escaped or ch != '"'
            escaped = ch == "\\" and not escaped
        elif ch == '"':
            in_string = True
        elif ch in "{[":
            depth += 1
        elif ch in "}]":
            depth -= 1
            if not depth:
                return (yield)
        ch = yield
    raise NotACall


def string(ch: str, take: Take) -> Scan:
    """Reads a JSON string, with its quotation marks."""
    if ch != '"':
        raise NotACall
    escaped = False
    take(ch)
    while (ch := (yield)) != END:
        take(ch)
        if ch == '"' and not escaped:
            return (yield)
        escaped = ch == "\\" and not escaped
    raise NotACall


def value(ch: str, take: Take) -> Scan:
    """Reads any JSON value without validating it: an object or a list ends where its brackets balance, and a number or
    a literal ends before the next delimiter.
    """
    if ch == END or ch in ",:}]":
        raise NotACall
    if ch in "{[":
        return (yield from container(ch, take))
    if ch == '"':
        return (yield from string(ch, take))
    while ch != END and ch not in ",}]" and ch not in SPACE:
        take(ch)
        ch = yield
    return ch


class CallObject:
    """A reader of one object. `sink` receives the call once the name is known and the arguments begin."""

    def __init__(self, sink: CallSink, known: Container[str] | None) -> None:
        """If `known` is not None, an object is a call only if `known` contains its name, it has arguments, and all of
        its keys are in `STRICT_KEYS`.
        """
        self._sink = sink
        self._known = known
        self._name: str | None = None
        self._early: list[str] = []
        """Arguments that were read before the name."""
        self._has_arguments = False

    def read(self) -> Scan:
        """Reads an object, starting after the opening bracket. Raises NotACall if the object is not a call."""
        ch = yield from skip_space((yield))
        while True:
            key: list[str] = []
            ch = yield from string(ch, key.append)
            ch = yield from skip_space(ch)
            if ch != ":":
                raise NotACall
            ch = yield from skip_space((yield))
            ch = yield from self._member(_decoded(key), ch)
            ch = yield from skip_space(ch)
            if ch == "}":
                break
            if ch != ",":
                raise NotACall
            ch = yield from skip_space((yield))
        self._end()
        return (yield)

    def _member(self, key: str, ch: str) -> Scan:
        if self._known is not None and key not in STRICT_KEYS:
            raise NotACall
        if key in _NAME_KEYS and self._name is None:
            raw: list[str] = []
            ch = yield from string(ch, raw.append)
            self._take_name(_decoded(raw))
        elif key in ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            ch = yield from self._arguments(ch)
        else:
            ch = yield from value(ch, _ignore)
        return ch

    def _take_name(self, name: str) -> None:
        if not name or (self._known is not None and name not in self._known):
            raise NotACall
        self._name = name
        if self._early:
            self._sink.begin(name)
            self._sink.arguments("".join(self._early))

    def _arguments(self, ch: str) -> Scan:
        if ch == "{" and self._name is not None:
            self._sink.begin(self._name)
            return (yield from container(ch, self._sink.arguments))
        raw: list[str] = []
        ch = yield from value(ch, raw.append)
        self._early = [self._odd_arguments("".join(raw))]
        if self._name is not None:
            self._take_name(self._name)
        return ch

    def _odd_arguments(self, text: str) -> str:
        """Returns arguments that are not an object, or that preceded the name, as the text of an object if possible.
        Otherwise raises NotACall if the object has no marker and may therefore be data, or returns the text unchanged.
        """
        if text.startswith('"'):
            text = _decoded([text])
        elif text == "null":
            return "{}"
        if self._known is not None and not text.lstrip().startswith("{"):
            raise NotACall
        return text

    def _end(self) -> None:
        if self._name is None or (self._known is not None and not self._has_arguments):
            raise NotACall
        if not self._has_arguments:
            self._sink.begin(self._name)
            self._sink.arguments("{}")


def _decoded(raw: list[str]) -> str:
    try:
        return str(json.loads("".join(raw), strict=False))
    except ValueError:
        raise NotACall from None


def _ignore(text: str) -> None:
    pass
