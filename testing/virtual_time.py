"""An event loop whose time passes only while nothing is ready to run: timers end in their order however slow or busy
the machine is, and sleeping takes no time.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec
from unittest import mock

P = ParamSpec("P")


class _Clock(selectors.DefaultSelector):
    """A selector that, instead of waiting for a timer, moves the time on to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(None if timeout is None else 0)
        if not found and timeout is not None:
            self.now += max(timeout, 0.0)
        return found


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an asynchronous test with a virtual `time.monotonic` and `time.sleep`. The test must use neither sockets nor
    threads nor other processes.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        clock = _Clock()
        with (
            mock.patch.object(time, "monotonic", lambda: clock.now),
            mock.patch.object(time, "sleep", clock.pause),
            asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner,
        ):
            runner.run(test(*args, **kwargs))

    return run
