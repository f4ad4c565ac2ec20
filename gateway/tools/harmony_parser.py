"""Reads whole answers in the format of gpt-oss, which is called harmony: messages with a channel and a recipient.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json
<|message|>{...}<|call|>` is reasoning and a call; the channel `final` has the content.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from gateway.tools.call_object import END, Scan, Take, read_among, skip_space
from gateway.tools.call_parsers import CallParser
from gateway.tools.pieces import Reasoning

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END_MESSAGE = "<|end|>"
_ENDS = (END_MESSAGE, "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
FUNCTIONS = "functions."
Mark = Generator[None, str, tuple[str, str]]
"""A reader that returns a mark and the next character."""


class HarmonyParser(CallParser):
    """A parser of messages. Text outside of messages is content: it continues a message that the prompt began."""

    triggers = frozenset("<")

    def _marked(self, ch: str) -> Scan:
        """Reads from a mark to the text of a message with content, or to text outside of messages."""
        mark, ch = yield from self._one_of(ch, MARKS)
        while mark and mark not in _ENDS:
            header: list[str] = []
            while mark and mark != MESSAGE and mark not in _ENDS:
                header.append(mark)
                mark, ch = yield from _until_mark(ch, header.append)
            if mark != MESSAGE:
                break
            channel, recipient = _channel("".join(header)), _recipient("".join(header))
            if recipient.startswith(FUNCTIONS):
                mark, ch = yield from self._call(ch, recipient.removeprefix(FUNCTIONS))
            elif recipient or channel == "analysis":
                mark, ch = yield from _until_mark(ch, self._reasoning)
            else:
                break
        return ch

    def _call(self, ch: str, name: str) -> Mark:
        """Reads the arguments of a call, up to the next mark."""
        ch = yield from skip_space(ch)
        self.begin(name)
        if ch == "<":
            found = yield from read_among(ch, MARKS)
            if found[0] in MARKS:
                self.arguments("{}")
                return found
            self.arguments(found[0])
            ch = found[1]
        return (yield from _until_mark(ch, self.arguments))

    def _reasoning(self, text: str) -> None:
        self._end_arguments()
        self._out.append(Reasoning(text))


def _channel(header: str) -> str:
    found = re.search(r"<\|channel\|>\s*(\w+)", header)
    return found[1] if found is not None else ""


def _recipient(header: str) -> str:
    """Returns the function or tool to which a message is addressed, or an empty string."""
    found = re.search(r"\bto=([^\s<]+)", header)
    return found[1] if found is not None else ""


def _until_mark(ch: str, take: Take) -> Mark:
    """Passes on text up to a mark. Returns the mark, or "" at the end of the text, and the next character."""
    while ch != END:
        if ch == "<":
            read, ch = yield from read_among(ch, MARKS)
            if read in MARKS:
                return read, ch
            take(read)
        else:
            take(ch)
            ch = yield
    return "", ch
