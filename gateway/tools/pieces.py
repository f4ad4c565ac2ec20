"""Defines the pieces of an answer's text: content, reasoning, and parts of tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call: its number, name and id."""

    index: int
    """The call's number within the answer, from 0."""
    name: str
    call_id: str | None = None
    """The id that the model itself wrote, or None if the parser passes on no ids."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of the arguments of a call, usually of a JSON object. Arguments that the model wrote in another notation
    have been converted to JSON.
    """

    index: int
    text: str


Piece = Content | Reasoning | CallBegin | CallArguments


def merged(pieces: list[Piece]) -> list[Piece]:
    """Joins adjacent pieces of the same kind and the same call, and returns the resulting pieces."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and piece.index == last.index:
            joined[-1] = CallArguments(last.index, last.text + piece.text)
        else:
            joined.append(piece)
    return joined
