"""Finds tool calls in the formats of DeepSeek, Granite 3 and Phi-4-mini: JSON arguments between markers."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from gateway.tools.call_object import END, NotACall, Scan, container, skip_space
from gateway.tools.call_parsers import CallParser


class DeepSeekParser(CallParser):
    """A section of calls: DeepSeek V3 and R1 (arguments in a block of code), and V3.1 (plain arguments).

    V3: `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a line break, a block of JSON,
    `<｜tool▁call▁end｜><｜tool▁calls▁end｜>`. V3.1: the same with `name<｜tool▁sep｜>{...}` within a call.
    """

    triggers = frozenset("<")
    OPEN, CLOSE = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
    CALL, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    SEP = "<\uff5ctool\u2581sep\uff5c>"
    KIND, CODE, CODE_END = "function", "```json", "```"

    def _marked(self, ch: str) -> Scan:
        return (yield from self._after(ch, self.OPEN, self._calls))

    def _calls(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        ch = yield from _expect(ch, self.CALL)
        while True:
            ch = yield from self._call(ch)
            ch = yield from skip_space(ch)
            mark, ch = yield from self._one_of(ch, (self.CALL, self.CLOSE))
            if mark != self.CALL:
                return ch
            self._held = [mark, ch]

    def _call(self, ch: str) -> Scan:
        """Reads one call after its first marker."""
        name: list[str] = []
        ch = yield from _until(ch, "<", name)
        ch = yield from _expect(ch, self.SEP)
        in_code = ch != "{" and "".join(name) == self.KIND
        if in_code:
            name.clear()
            ch = yield from _until(ch, "\n", name)
            ch = yield from skip_space(ch)
            ch = yield from _expect(ch, self.CODE)
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

    def _one_of(self, ch: str, marks: Sequence[str]) -> Generator[None, str, tuple[str, str]]:
        """Reads one of several markers, none of which begins another. Returns "" if there is none; the part that
        matched becomes content.
        """
        read = ""
        while ch != END and any(mark.startswith(read + ch) for mark in marks):
            read += ch
            ch = yield
            if read in marks:
                return read, ch
        if read:
            self._content(read)
        return "", ch


class ListParser(CallParser):
    """A marker, then a list of `{"name": ..., "arguments": {...}}`, or one such object."""

    MARK: str

    def _marked(self, ch: str) -> Scan:
        return (yield from self._after(ch, self.MARK, self._calls))

    def _calls(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        return (yield from self._list(ch, None) if ch == "[" else self._objects(ch, "", None))


class GraniteParser(ListParser):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3."""

    triggers = frozenset("<")
    MARK = "<|tool_call|>"


class Phi4MiniParser(ListParser):
    """`functools[{"name": ..., "arguments": {...}}]`: Phi-4-mini."""

    triggers = frozenset("f")
    MARK = "functools"


def _expect(ch: str, mark: str) -> Scan:
    """Reads a marker. Raises NotACall for any other text."""
    for expected in mark:
        if ch != expected:
            raise NotACall
        ch = yield
    return ch


def _until(ch: str, end: str, into: list[str]) -> Scan:
    """Reads up to a character that a name cannot contain."""
    while ch not in (end, END, "\n"):
        into.append(ch)
        ch = yield
    return ch
