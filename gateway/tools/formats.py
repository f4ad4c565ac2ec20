"""Defines the formats of a served model's output, finds the ids of their special tokens, and gives ids to calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from gateway.tools.call_format import CallFormat
from gateway.tools.names import ReasoningFormatName
from gateway.tools.reasoning import CLOSE, OPEN


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """The formats of the served model's tool calls and reasoning. None means that a format is unknown or not used."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormatName | None = None

    @property
    def reasoning_marks(self) -> Sequence[str]:
        return () if self.reasoning is None else (OPEN, CLOSE)


def special_ids(tokenizer: Tokenizer, marks: Sequence[str]) -> dict[str, int]:
    """Returns the ids of the `marks` that are special tokens. The output's text usually contains no special tokens."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items() if token.special and token.content in marks}


class CallIds:
    """A source of ids for the calls of one answer. All ids are distinct."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._given: set[str] = set()

    def next(self, own: str | None = None) -> str:
        """Returns the id that the model itself wrote, if the id is new, and otherwise a random id."""
        made = own or self._new_id()
        while made in self._given:
            made = self._new_id()
        self._given.add(made)
        return made
