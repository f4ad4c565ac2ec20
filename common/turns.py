"""Threads that share the cores by turns: one steps at a time, in the order in which they asked."""

from __future__ import annotations

import threading
from types import TracebackType


class Turns:
    """A fair lock: `with turns:` waits for everybody who asked before. A `threading.Lock` is not fair: the thread that
    has just released it usually gets it again.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = 0
        self._served = 0

    @property
    def num_waiting(self) -> int:
        """Threads that have asked and wait."""
        with self._changed:
            return max(0, self._asked - self._served - 1)

    def __enter__(self) -> None:
        with self._changed:
            mine = self._asked
            self._asked += 1
            self._changed.wait_for(lambda: self._served == mine)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()
