"""Requests whose workers died while they had them: after the second death nobody is sent such a request any more.

A worker's death strikes every request that it had, the guilty one and its neighbours. These are prefilled again one at
a time, so that none shares the guilty one's second death; they complete, and are forgotten here when they do. Knows no
workers, only names of their lives.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.errors import Internal

MOST_DEATHS = 2
KEEP_S = 600.0
"""How long after its last death a request is remembered."""
MOST_REMEMBERED = 4096


@dataclass(slots=True)
class _Deaths:
    lives: set[str] = field(default_factory=set)
    """Each worker's death counts once, however many equal requests it had."""
    last_at: float = 0.0


class PoisonList:
    """Deaths by request. One thread."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()
        self._struck_one_at_a_time = asyncio.Lock()

    def check(self, digest: bytes) -> None:
        """Internal: the request's workers died twice."""
        deaths = self._deaths.get(digest)
        if deaths is not None and time.monotonic() - deaths.last_at > KEEP_S:
            del self._deaths[digest]
        elif deaths is not None and len(deaths.lives) >= MOST_DEATHS:
            raise Internal("the workers of this request died more than once; it is not tried again for a while")

    @asynccontextmanager
    async def apart(self, digest: bytes) -> AsyncGenerator[None, None]:
        """Hold this while a request is prefilled: of those that a death has struck one at a time gets it, all others at
        once. Internal as `check`."""
        if digest not in self._deaths:
            yield
            return
        async with self._struck_one_at_a_time:
            self.check(digest)
            yield

    def died(self, digest: bytes, life: str) -> None:
        """The worker named by `life` ended while it had the request."""
        deaths = self._deaths.setdefault(digest, _Deaths())
        deaths.lives.add(life)
        deaths.last_at = time.monotonic()
        self._deaths.move_to_end(digest)
        if len(self._deaths) > MOST_REMEMBERED:
            self._deaths.popitem(last=False)

    def completed(self, digest: bytes) -> None:
        """The request is harmless."""
        self._deaths.pop(digest, None)


def digest_of(prompt_ids: Sequence[int], salt: bytes) -> bytes:
    """What names a request here: its tenant's salt and its prompt, not the seed, which costs nothing to change."""
    return hashlib.sha256(salt + array("I", prompt_ids).tobytes()).digest()
