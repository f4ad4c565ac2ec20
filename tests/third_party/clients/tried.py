"""Helpers for the scripts of this folder: they mark the features that a script tries, and print one JSON line with the
result of each.

A script is run with its client's interpreter, so this file uses the standard library only.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ["LOOSELEAF_URL"]
"""The server with the built-in model, without a path."""
TOOLS_URL = os.environ["LOOSELEAF_TOOLS_URL"]
"""A server with the same weights and a chat template that supports tools."""
MODEL = "storyteller"

_tries: list[tuple[str, str, Callable[[], Any], str | None]] = []


def works(what: str, remark: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Marks a function that must succeed. `remark` is a limit of the client, for the table."""

    def note(function: Callable[[], Any]) -> Callable[[], Any]:
        _tries.append((what, remark, function, None))
        return function

    return note


def refused(what: str, message: str, remark: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Marks a function that must raise, because of a limit of the server. The error must contain `message`."""

    def note(function: Callable[[], Any]) -> Callable[[], Any]:
        _tries.append((what, remark, function, message))
        return function

    return note


def run() -> None:
    """Runs the marked functions in their order."""
    for what, remark, function, message in _tries:
        error = _error_of(function, message)
        line = {"what": what, "remark": remark, "refused": message is not None, "error": error}
        print(json.dumps(line), flush=True)


def _error_of(function: Callable[[], Any], message: str | None) -> str | None:
    """Returns the error, or None if the function behaves as expected."""
    try:
        function()
    except Exception as error:
        if message is not None and message in f"{type(error).__name__}: {error}":
            return None
        return traceback.format_exc()
    return None if message is None else "was not refused: the limit is gone, so mark it as works"
