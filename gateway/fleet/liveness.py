"""How long a peer has said nothing. A pause of this very process (stopped, or its loop busy) is not held against it."""

from __future__ import annotations

import asyncio
import time

TICK_S = 0.25
OWN_PAUSE_S = 0.5
"""A tick that comes later than this says that we were not there to hear."""


class Silence:
    """Since when nothing was heard."""

    __slots__ = ("_heard_at", "_limit_s")

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard_at = time.monotonic()

    def heard(self) -> None:
        self._heard_at = time.monotonic()

    async def lasts(self) -> None:
        """Return once nothing was heard for the limit, at most a tick later."""
        tick_s = min(TICK_S, self._limit_s / 4)
        last = time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            if now - last > tick_s + OWN_PAUSE_S:
                self._heard_at = now
            elif now - self._heard_at > self._limit_s:
                return
            last = now
