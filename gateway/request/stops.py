"""Finds stop strings in streamed text.

Text that may be the beginning of a stop string is held back until it is clear whether the stop string follows. Apart
from `may_stop`, the result does not depend on how the text is divided into pieces. The stop string that is complete
first ends the text. If several stop strings are complete at the same character, the longest of them ends the text.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """A matcher of stop strings in one sample's text. `matched` is the stop string that ended the text, or None."""

    __slots__ = ("_first_chars", "_held", "_include", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._include = include_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Returns the text that may be sent now. If `may_stop` is false (min_tokens not yet reached), stop strings
        completed by `text` are ignored.
        """
        if not self._stops or not text:
            return text
        buffer = self._held + text
        if may_stop:
            begin, end = self._first_match(buffer)
            if end:
                self._held = ""
                return buffer[: end if self._include else begin]
        keep = self._may_begin_at(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """Returns the text that has been held back. Must be called when no more text will follow."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, int]:
        """Returns the positions of the beginning and the end of the stop string that is complete first within the new
        text, and sets `matched` to the stop string. Returns (0, 0) if no stop string is complete.
        """
        new_from = len(self._held)
        best = (0, 0)
        for stop in self._stops:
            begin = buffer.find(stop, max(0, new_from - len(stop) + 1))
            end = begin + len(stop)
            if begin >= 0 and (not best[1] or (end, begin) < (best[1], best[0])):
                best = (begin, end)
                self.matched = stop
        return best

    def _may_begin_at(self, buffer: str) -> int:
        """Returns the first position from which the rest of the buffer is the beginning of a stop string, or the
        buffer's length if there is none.
        """
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._first_chars:
                rest = buffer[start:]
                if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stops):
                    return start
        return len(buffer)
