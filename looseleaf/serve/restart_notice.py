"""A file that exists while a service of a launch is being restarted. The gateway checks the file (`--restarts-file`).
As long as the file exists, requests wait for workers until their deadlines.
"""

from __future__ import annotations

from pathlib import Path

from looseleaf.serve.children import Child


class RestartNotice:
    """The notice file of one launch. One thread must make all calls of `add` and `check`."""

    def __init__(self) -> None:
        self.file: Path | None = None
        """The path of the file, which must be set before the first `add`."""
        self._starting: list[Child] = []

    def add(self, child: Child) -> Child:
        """Writes the notice, because `child` has just taken the place of a service that ended. Returns `child`."""
        assert self.file is not None
        self._starting.append(child)
        self.file.touch()
        return child

    def check(self) -> None:
        """Removes the notice when every added child has become ready or has ended."""
        if self._starting:
            self._starting = [child for child in self._starting if child.status is None and not child.ready_lines()]
            if self.file is not None and not self._starting:
                self.file.unlink(missing_ok=True)
