"""Requests whose workers died while they had them: after the second death nobody is sent such a request any more.

A worker's death strikes every request that it had, the guilty one and its neighbours. Whoever was struck is prefilled
again with nobody beside it, and others wait until decode has gone on with it too: so the next death names the guilty
one, and a neighbour is not struck twice. Progress in decode is proof of innocence. Knows no workers, only names of
their lives.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

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


class _Company:
    """Who of this gateway is in its first steps in one life of a worker."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """First come, first served; whoever must be alone keeps it."""
        self.empty = asyncio.Event()
        self.empty.set()
        self._inside = 0

    def enter(self) -> None:
        self._inside += 1
        self.empty.clear()

    def end_turn(self) -> None:
        self.turn.release()

    def leave(self) -> None:
        self._inside -= 1
        if not self._inside:
            self.empty.set()


class Entry:
    """Leave to be with a worker, until `leave`."""

    __slots__ = ("_leave", "alone")

    def __init__(self, leave: Callable[[], None], *, alone: bool) -> None:
        self._leave: Callable[[], None] | None = leave
        self.alone = alone

    def leave(self) -> None:
        """Once or more often."""
        if self._leave is not None:
            self._leave()
            self._leave = None


class PoisonList:
    """Deaths by request. One thread."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()
        self._companies: WeakValueDictionary[str, _Company] = WeakValueDictionary()

    def check(self, digest: bytes) -> None:
        """Internal: the request's workers died twice."""
        deaths = self._deaths.get(digest)
        if deaths is not None and time.monotonic() - deaths.last_at > KEEP_S:
            del self._deaths[digest]
        elif deaths is not None and len(deaths.lives) >= MOST_DEATHS:
            raise Internal("the workers of this request died more than once; it is not tried again for a while")

    async def enter(self, digest: bytes, life: str) -> Entry:
        """Wait until a request may be sent to this life of a worker: alone if a death has struck it, else beside all
        others that no death has struck. Internal as `check`."""
        company = self._companies.setdefault(life, _Company())
        await company.turn.acquire()
        try:
            self.check(digest)
            if digest in self._deaths:
                await company.empty.wait()
                self.check(digest)
                return Entry(company.end_turn, alone=True)
        except BaseException:
            company.end_turn()
            raise
        company.enter()
        company.end_turn()
        return Entry(company.leave, alone=False)

    def died(self, digest: bytes, life: str) -> None:
        """The worker named by `life` ended while it had the request."""
        deaths = self._deaths.setdefault(digest, _Deaths())
        deaths.lives.add(life)
        deaths.last_at = time.monotonic()
        self._deaths.move_to_end(digest)
        if len(self._deaths) > MOST_REMEMBERED:
            self._deaths.popitem(last=False)

    def survived(self, digest: bytes) -> None:
        """Decode went on with the request since the last death, or it is complete: it did not cause that."""
        self._deaths.pop(digest, None)


def digest_of(prompt_ids: Sequence[int], salt: bytes) -> bytes:
    """What names a request here: its tenant's salt and its prompt, not the seed, which costs nothing to change."""
    return hashlib.sha256(salt + array("I", prompt_ids).tobytes()).digest()
