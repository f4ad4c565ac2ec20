"""Looks after a launch: services that have ended are started again."""

from __future__ import annotations

import threading

from looseleaf.serve.launcher import Launcher

CHECK_S = 0.05
"""How late a death may be noticed, which is part of the pause that it makes."""


def supervise(launcher: Launcher, ended: threading.Event) -> None:
    """`launcher.check` until `ended`. Raises ChildDied for a service that keeps ending."""
    while not ended.wait(CHECK_S):
        launcher.check()


class Supervisor(threading.Thread):
    """`supervise` in a thread of its own, until `end` or a death that cannot be mended (`failure`)."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(name="supervisor", daemon=True)
        self._launcher = launcher
        self._ended = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            supervise(self._launcher, self._ended)
        except Exception as failure:
            self.failure = failure

    def end(self) -> None:
        self._ended.set()
        self.join()
