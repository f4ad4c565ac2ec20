"""Ends answers that take too long to write, or all open answers at once. This module does no I/O.

To end an answer, this module raises an error inside the answer's scope. The code that writes the answer then informs
the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import DeadlineExceeded, LooseleafError, Unavailable

RETRY_AFTER_S = 1.0


class OpenAnswers:
    """The set of answers that one gateway is writing."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._ended = False

    @asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[None]:
        """A context manager for the task that writes an answer. Raises DeadlineExceeded after `timeout_s`, because the
        client has not read the answer in time, and Unavailable when `end` is called.
        """
        scope = asyncio.timeout(0.0 if self._ended else timeout_s)
        try:
            async with scope:
                self._scopes.add(scope)
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._why() from None
        finally:
            self._scopes.discard(scope)

    def end(self) -> None:
        """Ends all open answers, and every answer that begins later."""
        self._ended = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(now)

    def _why(self) -> LooseleafError:
        if self._ended:
            return Unavailable("this gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        return DeadlineExceeded("the client did not read its answer in time")
