"""Finds tool calls in a model's output as it arrives: the base class of all parsers, and the parsers for the formats of
Hermes, Llama 3 and 4, and Mistral, and for JSON without a marker.

A call is passed on once its name is known and its arguments begin. Text that begins like a call but is not one becomes
content. If there are calls, white space that is not next to content is dropped. Text that was held back is not searched
again, so the cost is linear in the length of the output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from gateway.tools.call_object import END, CallObject, NotACall, Scan, container, read_among, skip_space
from gateway.tools.pieces import CallArguments, CallBegin, Content, Piece, merged

Marked = Generator[None, str, tuple[bool, str]]
Tools = Mapping[str, Mapping[str, Any]]
"""The names of the tools, with the JSON schemas of their arguments."""


class CallParser(ABC):
    """The base class of parsers of one sample's text. The pieces (after `merged`) do not depend on how the text is
    split across calls of `feed`.
    """

    triggers: frozenset[str]
    """The characters that may begin a call."""

    def __init__(self, known: Tools, max_calls: int | None = None) -> None:
        """Calls beyond `max_calls` are dropped. None means no limit."""
        self.num_calls = 0
        self._known = known
        self._max_calls = max_calls
        self._out: list[Piece] = []
        self._arguments: list[str] = []
        """Arguments of the current call that are not in `_out` yet."""
        self._space: list[str] | None = []
        """White space since the beginning or since the last call; None once there is content."""
        self._held: list[str] | None = None
        """Text that may turn out to be a call."""
        self._last = END
        self._idle = False
        """Whether the next character is content unless it is a trigger."""
        self._scan = self._read()
        next(self._scan)

    def feed(self, text: str) -> list[Piece]:
        if self._idle and self.triggers.isdisjoint(text):
            self._content(text)
        else:
            for ch in text:
                if self._held is not None:
                    self._held.append(ch)
                self._last = ch
                self._scan.send(ch)
        return self._taken()

    def finish(self) -> list[Piece]:
        """Returns the pieces of the text that is still held back. Must be called after the last `feed`."""
        self._last = END
        try:
            self._scan.send(END)
        except StopIteration:
            pass
        else:
            raise AssertionError("the reader continues after the end")
        if self._space and not self.num_calls:
            self._out.append(Content("".join(self._space)))
        return self._taken()

    def _taken(self) -> list[Piece]:
        self._end_arguments()
        pieces, self._out = merged(self._out), []
        return pieces

    # --- results of reading

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._end_arguments()
        self._held, self._space = None, []
        if self._max_calls is None or self.num_calls < self._max_calls:
            self._out.append(CallBegin(self.num_calls, name, call_id))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        self._held = None
        self._arguments.append(text)

    def _end_arguments(self) -> None:
        if self._arguments and (self._max_calls is None or self.num_calls <= self._max_calls):
            self._out.append(CallArguments(self.num_calls - 1, "".join(self._arguments)))
        self._arguments.clear()

    def _content(self, text: str) -> None:
        self._end_arguments()
        if self._space is not None:
            if not text or text.isspace():
                self._space.append(text)
                return
            text, self._space = "".join(self._space) + text, None
        self._out.append(Content(text))

    # --- readers

    def _read(self) -> Generator[None, str, None]:
        """Reads the whole text."""
        ch = yield
        while ch != END:
            if ch in self.triggers:
                ch = yield from self._marked(ch)
                continue
            self._idle = True
            self._content(ch)
            ch = yield
            self._idle = False

    @abstractmethod
    def _marked(self, ch: str) -> Scan:
        """Reads the text that begins with a trigger."""

    def _after(self, ch: str, marker: str, read: Callable[[str], Scan]) -> Scan:
        """Reads a marker, and uses `read` to read the text after it."""
        found, ch = yield from self._matches(ch, marker)
        return (yield from self._begun(marker, ch, read)) if found else ch

    def _begun(self, marker: str, ch: str, read: Callable[[str], Scan]) -> Scan:
        """Uses `read` to read the text after a marker. If the text is not a call, the marker and the text become
        content.
        """
        self._held = [marker, ch]
        try:
            ch = yield from read(ch)
        except NotACall:
            ch = self._last
            if self._held is not None:
                text = "".join(self._held)
                self._content(text[: len(text) - len(ch)])
        self._held = None
        return ch

    def _objects(self, ch: str, separators: str, known: Tools | None) -> Scan:
        """Reads one or more objects, which may be separated by one of `separators`. `ch` is the opening bracket of the
        first object.
        """
        while True:
            if ch != "{":
                raise NotACall
            ch = yield from CallObject(self, known).read()
            ch = yield from skip_space(ch)
            if ch == END or ch not in separators + "{":
                return ch
            self._held = [ch]
            if ch != "{":
                ch = yield from skip_space((yield))

    def _list(self, ch: str, known: Tools | None) -> Scan:
        """Reads a list of objects. `ch` is the list's opening bracket."""
        ch = yield from skip_space((yield))
        ch = yield from self._objects(ch, ",", known)
        if ch != "]":
            raise NotACall
        return (yield)

    def _matches(self, ch: str, marker: str) -> Marked:
        """Reads a marker. Returns whether the marker was complete. Otherwise, the part that matched becomes content."""
        for index, expected in enumerate(marker):
            if ch != expected:
                if index:
                    self._content(marker[:index])
                return False, ch
            ch = yield
        return True, ch

    def _one_of(self, ch: str, marks: Sequence[str]) -> Generator[None, str, tuple[str, str]]:
        """Reads one of several markers, none of which begins another. Returns the marker and the next character. If
        there is no marker, returns "" for it, and the part that matched becomes content.
        """
        read, ch = yield from read_among(ch, marks)
        if read in marks:
            return read, ch
        if read:
            self._content(read)
        return "", ch


class HermesParser(CallParser):
    """A parser of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5, Qwen 3)."""

    triggers = frozenset("<")
    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def _marked(self, ch: str) -> Scan:
        return (yield from self._after(ch, self.OPEN, self._block))

    def _block(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        ch = yield from self._objects(ch, "", None)
        _, ch = yield from self._matches(ch, self.CLOSE)
        return ch


class Llama3Parser(CallParser):
    """A parser of `{"name": ..., "parameters": {...}}`, also after `<|python_tag|>` (Llama 3.1 to 3.3).

    Without the tag, an object is a call only if it has the name of a tool.
    """

    triggers = frozenset("<{")
    TAG, CLOSE = "<|python_tag|>", ""
    SEPARATORS = ";,"

    def _marked(self, ch: str) -> Scan:
        if ch == "{":
            return (yield from self._begun("", ch, lambda ch: self._objects(ch, self.SEPARATORS, self._known)))
        return (yield from self._after(ch, self.TAG, self._tagged))

    def _tagged(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        ch = yield from self._objects(ch, self.SEPARATORS, None)
        if self.CLOSE:
            _, ch = yield from self._matches(ch, self.CLOSE)
        return ch


class Llama4Parser(Llama3Parser):
    """A parser of Llama 3's format, also between `<|python_start|>` and `<|python_end|>` (Llama 4)."""

    TAG, CLOSE = "<|python_start|>", "<|python_end|>"


class MistralParser(CallParser):
    """A parser of Mistral's `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and of the later form
    `[TOOL_CALLS]name[ARGS]{...}`.
    """

    triggers = frozenset("[")
    MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

    def _marked(self, ch: str) -> Scan:
        return (yield from self._after(ch, self.MARKER, self._calls))

    def _calls(self, ch: str) -> Scan:
        ch = yield from skip_space(ch)
        if ch == "[":
            return (yield from self._list(ch, None))
        if ch == "{":
            return (yield from self._objects(ch, "", None))
        return (yield from self._named(ch))

    def _named(self, ch: str) -> Scan:
        name: list[str] = []
        while ch != END and ch not in "[{" and not ch.isspace():
            name.append(ch)
            ch = yield
        if ch == "[":
            ch = yield from self._bracketed(ch)
        ch = yield from skip_space(ch)
        if not name or ch != "{":
            raise NotACall
        self.begin("".join(name))
        return (yield from container(ch, self.arguments))

    def _bracketed(self, ch: str) -> Scan:
        """Reads `[ARGS]`, optionally preceded by `[CALL_ID]` and an id, which is dropped."""
        while ch != END:
            word: list[str] = []
            while ch != END and ch != "]":
                word.append(ch)
                ch = yield
            if ch == END:
                break
            found = "".join(word) + ch
            ch = yield
            if found == self.ARGS:
                return ch
            if found != self.CALL_ID:
                break
            while ch.isalnum():
                ch = yield
        raise NotACall


class JsonParser(CallParser):
    """A parser of `{"name": ..., "arguments": {...}}`, or of a list of objects in this form.

    There is no marker, so an object is a call only if it has the name of a tool.
    """

    triggers = frozenset("{[")

    def _marked(self, ch: str) -> Scan:
        if ch == "{":
            return (yield from self._begun("", ch, lambda ch: self._objects(ch, ";,", self._known)))
        return (yield from self._begun("", ch, lambda ch: self._list(ch, self._known)))
