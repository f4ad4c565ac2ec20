"""Separates the reasoning between `<think>` and `</think>` from a model's output as it arrives."""

from __future__ import annotations

from collections.abc import Sequence

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """A splitter for one sample. Only the beginning of the output may be reasoning; later tags are content."""

    def __init__(self, *, inside: bool) -> None:
        """`inside` is true if the output begins within the reasoning, with or without `<think>`."""
        self._inside = inside
        self._state = "start"
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Returns the new reasoning and the new content, as far as they can be distinguished."""
        if self._state == "content":
            return "", text
        text, self._held = self._held + text, ""
        if self._state == "start" and (text := self._started(text)) == "":
            return "", ""
        if self._state == "content":
            return "", text
        reasoning, close, content = text.partition(CLOSE)
        if close:
            self._state = "content"
            return reasoning, content
        keep = len(text) - overlap(text, CLOSE)
        self._held = text[keep:]
        return text[:keep], ""

    def finish(self) -> tuple[str, str]:
        """Returns the text that is still held back, as reasoning and content. One of them is empty."""
        held, self._held = self._held, ""
        is_reasoning = self._state == "reasoning" or (self._state == "start" and self._inside)
        return (held, "") if is_reasoning else ("", held)

    def _started(self, text: str) -> str:
        """Decides whether the output begins with reasoning. Returns the text to split, or "" if more text is needed."""
        begun = text.lstrip()
        if begun.startswith(OPEN):
            self._state = "reasoning"
            return begun.removeprefix(OPEN)
        if OPEN.startswith(begun):
            self._held = text
            return ""
        self._state = "reasoning" if self._inside else "content"
        return text


def overlap(text: str, marker: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


def begins_inside(parser: str, prompt: str, continued: str | None = None) -> bool:
    """Returns whether the output begins within the reasoning. `continued` is the message that the output continues, or
    None.

    A template may open (`<think>`) or skip (`<think></think>`) the reasoning itself. If the template does neither, the
    output of DeepSeek R1 begins inside the reasoning, whereas Qwen 3 emits `<think>` itself. A continued message may
    already have opened the reasoning.
    """
    if continued is not None:
        return continued.rfind(OPEN) > continued.rfind(CLOSE)
    end = prompt[-64:].rstrip()
    if end.endswith(OPEN):
        return True
    return parser == "deepseek_r1" and not end.endswith(CLOSE)


PARSERS: Sequence[str] = ("qwen3", "deepseek_r1")
