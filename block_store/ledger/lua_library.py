"""The Lua library of the ledger's scripts, of which each script gets the parts that it uses.

Redis runs the whole text of a script at every call. Defining the whole library takes more than half of the time of a
short call.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

FILES = ("state", "room", "prefix_index", "cache", "references", "holders", "sealing")
"""Files of `lua/lib`. Each file may use the files that precede it."""
_NAME = re.compile(r"[A-Za-z_]\w*")
_DEFINED = re.compile(r"local (?:function (\w+)|(\w+(?:, \w+)*) =)")
_COMMENT = re.compile(r"--.*")


def source(name: str) -> str:
    """Returns the text of the file `lua/<name>.lua`."""
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text()


@functools.cache
def with_library(script: str) -> str:
    """Returns a script, preceded by the statements of the library that it uses directly or indirectly, and by those
    that define nothing.
    """
    used, kept = _names(script), [script]
    for statement in reversed(_statements()):
        if _defined(statement) & used or not _defined(statement):
            used |= _names(statement)
            kept.append(statement)
    return "\n".join(reversed(kept))


@functools.cache
def _statements() -> tuple[str, ...]:
    """Returns the statements of the library, without comments. A statement begins in the first column, and only the
    `end` that closes it is there too.
    """
    return tuple(statement for name in FILES for statement in _split(source(f"lib/{name}")))


def _split(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in filter(None, (_COMMENT.sub("", line).rstrip() for line in text.splitlines())):
        if lines and not line.startswith((" ", "end")):
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def _defined(statement: str) -> set[str]:
    """Returns the names that a statement defines for the statements after it."""
    found = _DEFINED.match(statement)
    return set() if found is None else set(_NAME.findall(found[1] or found[2]))


def _names(text: str) -> set[str]:
    """Returns the names in a text, and words that look like names."""
    return set(_NAME.findall(_COMMENT.sub("", text)))
