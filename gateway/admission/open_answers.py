"""The answers that are open, and their ends that the client did not ask for: too late, each, or all at once.

No I/O: an answer whose scope ends raises inside, and its writer tells its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import DeadlineExceeded, LooseleafError, Unavailable

RETRY_AFTER_S = 1.0


class OpenAnswers:
    """One per gateway."""

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._ended = False

    @asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[None]:
        """An answer is written inside, in one task. DeadlineExceeded: it took longer, since its client did not read;
        Unavailable: `end` was called.
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
        """End all answers, and those that are begun from now on."""
        self._ended = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            if not scope.expired():
                scope.reschedule(now)

    def _why(self) -> LooseleafError:
        if self._ended:
            return Unavailable("this gateway shuts down", retry_after_s=RETRY_AFTER_S)
        return DeadlineExceeded("the client did not read its answer in time")
