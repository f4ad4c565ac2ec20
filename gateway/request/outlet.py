"""Sends a request's deltas to the client.

At most one write is in progress. Output that arrives during a write is merged into at most one delta per sample. With
more than `FEW_STREAMS` streams, there is also an interval between two messages to a client, and the output that arrives
within the interval is sent together; the end of a sample does not wait for the interval. This module does not depend on
tokenizers, gRPC or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, Self

from gateway.request.delta import Delta

Write = Callable[[list[Delta]], Coroutine[Any, Any, None] | None]
"""A function that writes deltas to the client, at most one per sample. It returns None if the write is complete, or a
coroutine to run.
"""
LAST_WORD_S = 5.0
"""Time in seconds to wait, after a request has failed, for a client that does not read."""
MIN_PAUSE_S = 0.001
"""Pauses up to this length are skipped, because they are not worth a timer."""
MESSAGE_COST_S = 0.00025
"""The interval in seconds between a stream's messages is this time multiplied by the number of streams, if there are
more than `FEW_STREAMS`. With 64 streams, the interval is 16 ms. A message to a client costs the event loop up to 0.1
ms, so the loop has time left for new calls.
"""
FEW_STREAMS = 16
"""Up to this number of streams, there is no interval between messages."""


class Outlet:
    """A queue of one request's deltas that have not been written to the client. If a write may wait, the outlet must be
    used in `async with`.
    """

    __slots__ = ("_at_once", "_error", "_interval_s", "_leaves", "_left_at", "_settled", "_timer", "_write", "_writing",
                 "pending")  # fmt: skip

    def __init__(self, write: Write) -> None:
        self.pending: list[Delta] = []
        """Deltas that have arrived but have not been sent, at most one per sample. Later output can be merged into
        them.
        """
        self._write = write
        self._interval_s: Callable[[], float] = lambda: 0.0
        self._leaves: Callable[[Delta, float], None] = lambda delta, now: None
        self._left_at = 0.0
        self._at_once = False
        """Whether the pending deltas skip the interval."""
        self._timer: asyncio.TimerHandle | None = None
        self._writing = False
        self._error: BaseException | None = None
        self._settled: asyncio.Future[None] | None = None

    def open(self, interval_s: Callable[[], float], leaves: Callable[[Delta, float], None]) -> None:
        """Opens the outlet. `interval_s()` returns the current minimum time in seconds between two messages;
        `leaves(delta, now)` is called for each delta before it is written.
        """
        self._interval_s = interval_s
        self._leaves = leaves

    def flush(self, *, at_once: bool = False) -> None:
        """Starts writing the pending deltas: now, after the write in progress, or, unless `at_once`, at the end of the
        interval. Raises the error of an earlier write.
        """
        if self._error is not None:
            raise self._error
        if at_once:
            self._at_once = True
            self._stop_timer()
        if self._writing or self._timer is not None or not self.pending:
            return
        now = time.monotonic()
        if not self._at_once and (pause_s := self._left_at + self._interval_s() - now) > MIN_PAUSE_S:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._interval_over)
            return
        self._at_once, self._left_at = False, now
        deltas, self.pending = self.pending, []
        for delta in deltas:
            self._leaves(delta, now)
        if (coroutine := self._write(deltas)) is not None:
            self._writing = True
            self._step(coroutine)

    async def drained(self) -> None:
        """Flushes at once, and waits until all deltas have been written. Raises the error of a write that failed."""
        self.flush(at_once=True)
        while self._writing:
            self._settled = asyncio.get_running_loop().create_future()
            await self._settled
            self.flush(at_once=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Closes the outlet. After an error other than a cancellation, first writes the pending deltas, for at most
        `LAST_WORD_S`.
        """
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                async with asyncio.timeout(LAST_WORD_S):
                    await self.drained()
        self._stop_timer()
        self.pending.clear()

    def _interval_over(self) -> None:
        self._timer = None
        self._at_once = True
        self._go_on()

    def _go_on(self) -> None:
        try:
            self.flush()
        except Exception as error:  # raised by `leaves` or `write`; the next flush raises it where the request sees it
            self._error = error

    def _step(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a write until it waits for a future, and continues the write when the future is done. A write that does
        not wait is complete when this call returns, whereas a task would not have begun.
        """
        try:
            waits_for = coroutine.send(None)
        except StopIteration:
            self._writing = False
            if self._settled is not None or self.pending:
                self._written(None)
        except (Exception, asyncio.CancelledError) as error:
            self._written(error)
        else:
            if waits_for is None:  # a bare yield: other callbacks run first
                asyncio.get_running_loop().call_soon(self._step, coroutine)
                return
            waits_for._asyncio_future_blocking = False  # as `Task` does, to show that `await` was used
            waits_for.add_done_callback(lambda _: self._step(coroutine))

    def _written(self, error: BaseException | None) -> None:
        self._writing = False
        self._error = self._error or error
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
        elif self._error is None and self.pending:
            self._go_on()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
