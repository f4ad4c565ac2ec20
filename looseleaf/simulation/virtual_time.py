"""An event loop for asyncio with a clock of its own. Nothing sleeps: when all tasks wait, the clock moves to the time
of the next timer. A program without other threads or I/O therefore runs the same way each time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipper(selectors.BaseSelector):
    """A selector that moves a clock instead of waiting. The loop registers its own pipe, which nobody uses."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self.now_s = 0.0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("every task of the simulation waits for another one")
        self.now_s += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose `time` begins at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._skipper = _Skipper()
        super().__init__(self._skipper)

    def time(self) -> float:
        return self._skipper.now_s

    def pause(self, seconds: float) -> None:
        """Advances the clock by `seconds` at once, as if the process had been suspended for this time."""
        self._skipper.now_s += seconds


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end in virtual time, and returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
