"""Isolates requests whose workers have died. A request that has lost two workers is refused for a while.

When a worker dies, the requests that this gateway had sent to it become suspects, because any of them may have caused
the death. A suspect is prefilled again alone: other requests of this gateway for the same prefill worker wait until
decode has made its first step with the suspect, but at most `PROBATION_S` after the suspect's prefill. Earlier deaths
no longer count when the request is complete, or when it loses a worker after decode has produced a token for it. This
module does not call workers.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakValueDictionary

from common.errors import Internal

MOST_DEATHS = 2
KEEP_S = 600.0
"""How long a request is suspected after the last death of one of its workers, in seconds."""
MOST_REMEMBERED = 4096
PROBATION_S = 0.5
"""The longest time in seconds that other requests wait for decode's first step with a suspect, after the suspect's
prefill.
"""


@dataclass(slots=True)
class _Deaths:
    incarnations: set[str] = field(default_factory=set)
    """The incarnations that died. A death counts once, even if the worker had several equal requests."""
    last_at: float = 0.0


class _Neighbours:
    """A count of the requests that use one incarnation of a prefill worker together, and the lock with which a suspect
    gets the worker alone.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        """A lock that is granted in order of arrival. A suspect holds the lock while it is alone."""
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


class IsolationTicket:
    """A permission for a request to use a worker until `leave` is called. A suspect uses the worker alone. `leave` may
    be called more than once. As a context manager, the ticket calls `leave` at the end.
    """

    __slots__ = ("_leave", "alone")

    def __init__(self, leave: Callable[[], None], *, alone: bool) -> None:
        self._leave: Callable[[], None] | None = leave
        self.alone = alone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def prefilled(self, *, is_heard_of: bool) -> None:
        """Notes that the request's prefill is done. A suspect stays alone until decode's first step with it, but at
        most for `PROBATION_S`. If decode sends no tokens before the request ends (`is_heard_of` is false), as in a beam
        search, the suspect does not stay alone.
        """
        if self.alone and is_heard_of:
            asyncio.get_running_loop().call_later(PROBATION_S, self.leave)
        else:
            self.leave()

    def leave(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None


class Isolation:
    """A record, by request, of the workers that have died. It decides which requests may be prefilled together."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, _Deaths] = OrderedDict()
        self._by_worker: WeakValueDictionary[str, _Neighbours] = WeakValueDictionary()

    def check(self, digest: bytes) -> None:
        """Checks that the request may run. Raises Internal if at least `MOST_DEATHS` deaths are on record for the
        request, the last of them at most `KEEP_S` ago.
        """
        deaths = self._deaths.get(digest)
        if deaths is not None and time.monotonic() - deaths.last_at > KEEP_S:
            del self._deaths[digest]
        elif deaths is not None and len(deaths.incarnations) >= MOST_DEATHS:
            raise Internal(
                "the workers of this request died more than once; the request is not tried again for a while"
            )

    async def enter(self, digest: bytes, incarnation: str) -> IsolationTicket:
        """Waits until a request may be sent to this incarnation of a worker, and returns the permission. A suspect is
        sent alone; other requests may run together. Raises Internal for the same reason as `check`.
        """
        neighbours = self._by_worker.setdefault(incarnation, _Neighbours())
        await neighbours.turn.acquire()
        try:
            self.check(digest)
            if digest in self._deaths:
                await neighbours.empty.wait()
                self.check(digest)
                return IsolationTicket(neighbours.end_turn, alone=True)
        except BaseException:
            neighbours.end_turn()
            raise
        neighbours.enter()
        neighbours.end_turn()
        return IsolationTicket(neighbours.leave, alone=False)

    def died(self, digest: bytes, incarnation: str) -> None:
        """Notes that an incarnation of a worker died while it had the request."""
        deaths = self._deaths.setdefault(digest, _Deaths())
        deaths.incarnations.add(incarnation)
        deaths.last_at = time.monotonic()
        self._deaths.move_to_end(digest)
        if len(self._deaths) > MOST_REMEMBERED:
            self._deaths.popitem(last=False)

    def survived(self, digest: bytes) -> None:
        """Forgets the deaths that are on record for a request, which is then no longer a suspect."""
        self._deaths.pop(digest, None)


def digest_of(prompt_ids: Sequence[int], salt: bytes) -> bytes:
    """Returns the SHA-256 of a request's salt and prompt, by which this module identifies the request. The seed is left
    out, because a client could otherwise evade the limit with a new seed.
    """
    return hashlib.sha256(salt + array("I", prompt_ids).tobytes()).digest()
