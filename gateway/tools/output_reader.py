"""Reads the text of one sample as it arrives: reasoning first, then content and tool calls."""

from __future__ import annotations

from gateway.tools.call_parsers import CallParser
from gateway.tools.pieces import CallBegin, Content, Piece, Reasoning
from gateway.tools.reasoning import ReasoningSplitter


class OutputReader:
    """A reader of one sample's text. The reasoning parser and the call parser are both optional."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: CallParser | None) -> None:
        self._splitter = splitter
        self._parser = parser
        self.has_calls = False
        """Whether a call has been read."""

    def feed(self, text: str) -> list[Piece]:
        reasoning = ""
        if self._splitter is not None:
            reasoning, text = self._splitter.feed(text)
        return self._pieces(reasoning, text)

    def finish(self) -> list[Piece]:
        """Returns the pieces of the text that is still held back. Must be called after the last `feed`."""
        pieces: list[Piece] = []
        if self._splitter is not None:
            pieces = self._pieces(*self._splitter.finish())
        if self._parser is not None:
            pieces += self._noted(self._parser.finish())
        return pieces

    def _pieces(self, reasoning: str, text: str) -> list[Piece]:
        pieces: list[Piece] = [Reasoning(reasoning)] if reasoning else []
        if text and self._parser is None:
            pieces.append(Content(text))
        elif text and self._parser is not None:
            pieces += self._noted(self._parser.feed(text))
        return pieces

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        self.has_calls = self.has_calls or any(isinstance(piece, CallBegin) for piece in pieces)
        return pieces
