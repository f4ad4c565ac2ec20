"""Defines the interfaces of the bodies and answers of HTTP requests, which the API formats implement."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from common.errors import InvalidArgument, LooseleafError
from gateway.intake.resolved_request import ResolvedRequest
from gateway.intake.wanted import Wanted
from gateway.request.delta import Delta


class AskingBody(Protocol):
    """The interface of a parsed request body."""

    stream: bool | None

    def all_wanted(self) -> list[Wanted]:
        """Returns one request for each prompt. Raises InvalidArgument if a field is invalid, and Unimplemented if a
        field is not supported.
        """


class StreamForm(Protocol):
    """The interface that defines how a stream of events ends."""

    ending: bytes
    """The bytes that are sent after the last event of a stream that did not fail."""

    def failure(self, error: LooseleafError) -> bytes:
        """Returns the events that end a stream that failed after it had begun."""

    def error_object(self, error: LooseleafError) -> dict[str, Any]:
        """Returns the body of an answer that failed before its stream began."""


class WholeAnswer(Protocol):
    """The interface of the complete answer to one request body."""

    requests: list[ResolvedRequest]
    field_names: Mapping[str, str]
    """The body's names for fields that have other names in `Wanted`."""

    def all_wanted(self) -> list[Wanted]:
        """Returns one request for each prompt. Raises InvalidArgument if a field is invalid, and Unimplemented if a
        field is not supported.
        """

    def take(self, requests: list[ResolvedRequest]) -> None:
        """Takes the resolved requests. Must be called before `add`."""

    def add(self, number: int, deltas: Sequence[Delta]) -> None:
        """Adds deltas of request `number` to the complete answer."""

    def whole(self) -> Iterable[bytes]:
        """Returns the complete answer as JSON, in pieces of which each takes little time to create. All deltas must
        have been added.
        """


class HttpAnswer(WholeAnswer, StreamForm, Protocol):
    """The interface of the answer to one request body, complete or as events."""

    @property
    def asking(self) -> AskingBody: ...

    def events(self, number: int, deltas: Sequence[Delta]) -> bytes:
        """Returns the events for deltas of request `number`."""


def renamed(error: InvalidArgument, names: Mapping[str, str]) -> InvalidArgument:
    """Returns the error with the client's names for the invalid fields."""
    if not names or not error.violations:
        return error
    found = tuple(replace(violation, field=_renamed(violation.field, names)) for violation in error.violations)
    return type(error)(f"{found[0].field} {found[0].description}", violations=found)


def _renamed(field: str, names: Mapping[str, str]) -> str:
    """Returns a path such as stop[0] with its first name replaced if `names` contains it."""
    first = re.split(r"[.\[]", field, maxsplit=1)[0]
    return names.get(first, first) + field[len(first) :]
