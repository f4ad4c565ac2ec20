"""A process with the code of another checkout, which a comparison of two checkouts measures in turn with its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from common.errors import StartupError


class Checkout:
    """A running program with the code of one directory. It prints `ready` once, and after each line of its input a line
    `found` with words. Other lines are ignored.
    """

    def __init__(self, directory: Path, program: str, arguments: Sequence[str]) -> None:
        """Starts the Python program, without waiting for it."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(directory.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        """Waits until the program is ready. Raises StartupError if it ends."""
        self._read("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60.0)

    def ask(self, line: str) -> list[str]:
        """Returns the words that the program finds for `line`. Raises StartupError if it ends."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._read("found")

    def _read(self, word: str) -> list[str]:
        """Returns the words after `word` in the program's next line that begins with it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, *rest = line.split()
            if first == word:
                return rest
        raise StartupError(f"the program in {self._process.args!r} has ended")
