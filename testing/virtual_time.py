"""Runs asynchronous tests in virtual time: timers fire in the same order on any machine, and sleeping takes no time."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec
from unittest import mock

from looseleaf.simulation.virtual_time import VirtualLoop

P = ParamSpec("P")
BEGIN_S = 1000.0
"""`time.monotonic()` when a test begins. It is not 0, because some code uses 0 for a time in the distant past."""


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Wraps a test so that it runs with a virtual `time.monotonic`, and with a `time.sleep` that simulates a pause of
    the process. The test must use neither sockets nor threads nor other processes.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        loop = VirtualLoop()
        with (
            mock.patch.object(time, "monotonic", lambda: BEGIN_S + loop.time()),
            mock.patch.object(time, "sleep", loop.pause),
            asyncio.Runner(loop_factory=lambda: loop) as runner,
        ):
            runner.run(test(*args, **kwargs))

    return run
