"""Decides whether a launch has a spare worker, and manages its process (`python -m looseleaf.both_roles.spare`)."""

from __future__ import annotations

from collections.abc import Callable

from looseleaf.serve.children import Child, ChildDied, Echo, ServiceSpec
from looseleaf.serve.placement import most_ranks
from looseleaf.serve.settings import ServeSettings

NAME = "spare"
PACKAGE = "looseleaf.both_roles.spare"
WORKER = "looseleaf.both_roles"
"""The package whose flags and variables a spare worker has while it waits."""
WORKERS = ("prefill_svc", "decode_svc", WORKER)
"""Packages whose workers a spare worker can replace."""
FREE_WEIGHTS = 4
"""By default, there is a spare worker only if free memory is at least this many times the size of the weights."""
_LEAST_BYTES = 1 << 30
"""By default, there is a spare worker only if at least this many bytes of memory are free, even with a small model."""


def wanted(settings: ServeSettings, weights_bytes: int, free_bytes: int) -> tuple[bool, str]:
    """Returns whether a launch with these settings has a spare worker, and the reason, for the log. `weights_bytes` is
    the size of a worker's weights, and `free_bytes` is the free memory of the machine.
    """
    from block_store.server.sizing import gib  # imported here, so that services are started before numpy is loaded

    if settings.spare is not None:
        return settings.spare > 0, f"--spare {settings.spare}"
    if most_ranks(settings) > 1:
        return False, "workers have several ranks"
    if settings.device == "cuda":
        return False, "a second copy of the weights would take GPU memory; --spare 1 starts one"
    least = max(FREE_WEIGHTS * weights_bytes, _LEAST_BYTES)
    room = f"{gib(free_bytes)} of memory free, {gib(least)} wanted for {gib(weights_bytes)} of weights"
    return (True, f"{room}; --spare 0 starts none") if free_bytes >= least else (False, f"{room}; --spare 1 starts one")


class Standby:
    """The owner of a launch's spare worker. After a spare worker has replaced a dead worker and become ready, `check`
    starts the next one.
    """

    def __init__(self, start: Callable[[], Child], may_restart: Callable[[], bool], echo: Echo) -> None:
        self._start = start
        self._may_restart = may_restart
        self._echo = echo
        self._child: Child | None = None
        self._successor: Child | None = None
        """A spare worker that has taken a dead worker's place but is not serving yet."""
        self._has_failed = False

    @property
    def child(self) -> Child | None:
        return self._child

    @property
    def is_loaded(self) -> bool:
        return self._child is not None and self._child.ready_lines() is not None

    def take_place(self, spec: ServiceSpec) -> Child | None:
        """Makes the spare worker the process of `spec` and returns it. Returns None if no spare worker has loaded the
        model, or if it has ended or cannot replace this kind of process.
        """
        child = self._child
        if child is None or spec.package not in WORKERS or not self.is_loaded or not child.become(spec):
            return None
        self._child, self._successor = None, child
        return child

    def check(self) -> None:
        """Starts a spare worker if there is none, unless the last spare worker has replaced a worker and is not serving
        yet. If spare workers keep dying, no further spare worker is started.
        """
        if self._has_failed or (self._successor is not None and self._is_starting(self._successor)):
            return
        self._successor = None
        if self._child is None:
            self._child = self._start()
            return
        try:
            self._child.check()
        except ChildDied as died:
            self._echo(f"looseleaf: {died}")
            self._child, self._has_failed = None, not self._may_restart()

    def _is_starting(self, child: Child) -> bool:
        return child.status is None and child.ready_lines() is None
