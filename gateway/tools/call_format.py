"""Describes the format in which a model family writes tool calls."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.tools.call_parsers import CallParser, Tools
from gateway.tools.tag_parsers import Tags


def _long_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Returns an id in the form that Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class Spelling:
    """The spelling of a section of calls, for a grammar that enforces it. A part is a marker, text or a pattern."""

    opening: Sequence[str] = ()
    """The parts between the format's marker and the first call."""
    before_name: Sequence[str | re.Pattern[str]] = ()
    after_name: Sequence[str | re.Pattern[str]] = ()
    after_arguments: Sequence[str] = ()
    separator: Sequence[str] = ()
    """The parts between two calls."""
    closing: Sequence[str] = ()
    is_repeated: bool = False
    """Whether each call is in a separate section."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of one model family's tool calls."""

    name: str
    parser: Callable[[Tools, int | None], CallParser]
    """A function that returns a parser for the tools and the maximum number of calls (None: no limit)."""
    marks: Sequence[str] = ()
    """Parts of the output that may be special tokens. The parser needs their text."""
    new_id: Callable[[], str] = _long_id
    marker: str = ""
    """The text that precedes every call, or every list of calls; empty if a call may be plain JSON or a plain list."""
    compact: bool = False
    """Whether calls are written as `name[ARGS]{...}` and not as a list (Mistral)."""
    spelling: Spelling | None = None
    """The spelling, or None if `enforce` has a grammar for this format."""
    tags: Tags | None = None
    """The tags between which arguments are written, or None if there are none."""
    line_break: str = ""
    """The text that a template writes between the tags."""
    is_pythonic: bool = False
    """Whether calls are written as Python."""
    quote: str = ""
    """The mark before and after a text, if arguments are written in the notation of Gemma."""
    thought: Sequence[str | re.Pattern[str]] = ()
    """The spelling of the reasoning that may precede a call, if the format itself has reasoning."""
    covers_answer: bool = False
    """Whether all of an answer is written in this format, so that it must be read even if no tools are offered. A
    grammar allows only one call in such an answer.
    """
