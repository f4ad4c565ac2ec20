"""Watches a launch and restarts services that have ended."""

from __future__ import annotations

import threading

from looseleaf.serve.launcher import Launcher

CHECK_S = 0.05
"""The interval between checks for deaths, in seconds. It is part of the pause that a death causes."""


def supervise(launcher: Launcher, ended: threading.Event) -> None:
    """Calls `launcher.check` until `ended` is set. Raises ChildDied for a service that keeps ending."""
    while not ended.wait(CHECK_S):
        launcher.check()


class Supervisor(threading.Thread):
    """A thread that runs `supervise` until `end` is called or `supervise` fails. `failure` is the error, if any."""

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
