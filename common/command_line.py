"""Removes secrets from a process's command line, which other users of the machine can read, for example with `ps`.

The operating system shows the original command line until this code has run, shortly after startup. To hide a value
completely, pass it in a variable or in a file.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

_HIDDEN = "***"


def hidden(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """Returns `words` with the values of these flags (`--api-key VALUE`, `--api-key=VALUE`) replaced by asterisks."""
    shown: list[str] = []
    for word in words:
        name, separator, _ = word.partition("=")
        if shown and shown[-1] in flags:
            shown.append(_HIDDEN)
        elif separator and name in flags:
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(word)
    return shown


def hide_values(flags: Collection[str]) -> None:
    """Hides the values of these flags in this process's command line."""
    shown = hidden(sys.orig_argv, flags)
    if shown != sys.orig_argv:
        import setproctitle  # imported only here, because it moves the environment

        setproctitle.setproctitle(" ".join(shown))
