"""The open answers. Ends an answer that takes too long, or all of them at once. No I/O.

When an answer is ended in this way, an error is raised inside its scope, and the answer's writer informs the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import DeadlineExceeded, LooseleafError, Unavailable

RETRY_AFTER_S = 1.0


class OpenAnswers:
    """The open answers of one gateway."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._ended = False

    @asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[None]:
        """A scope in which an answer is written, in one task. Raises DeadlineExceeded if writing takes too long because
        the client does not read, and Unavailable if `end` is called.
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
        """Ends all answers, including those that begin later."""
        self._ended = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(now)

    def _why(self) -> LooseleafError:
        if self._ended:
            return Unavailable("this gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        return DeadlineExceeded("the client did not read its answer in time")
