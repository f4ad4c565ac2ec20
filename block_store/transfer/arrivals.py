"""The record of the copies that are under way, by prefix hash. A pull that needs one of these blocks waits for its
arrival, so that no block is copied twice. This module does not copy anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from common.errors import Unavailable


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    source: str
    ended: asyncio.Future[Unavailable | None]
    """The result is the error of a copy whose source did not answer. After any other end, it is None."""


class Arrivals:
    """The full blocks of one arena that are being copied. All methods run in the event loop."""

    def __init__(self) -> None:
        self._copies: dict[bytes, _Copy] = {}

    @contextmanager
    def arriving(self, source: str, hashes: Collection[bytes]) -> Iterator[None]:
        """Declares that the body of the `with` statement copies these blocks from `source`, and seals them."""
        copy = _Copy(source, asyncio.get_running_loop().create_future())
        own = [one for one in hashes if one not in self._copies]
        self._copies.update(dict.fromkeys(own, copy))
        failure: Unavailable | None = None
        try:
            yield
        except Unavailable as error:
            failure = error
            raise
        finally:
            for one in own:
                del self._copies[one]
            copy.ended.set_result(failure)

    def include(self, hashes: Collection[bytes]) -> bool:
        """Returns whether one of these blocks is being copied."""
        return any(one in self._copies for one in hashes)

    async def wait(self, source: str, hashes: Collection[bytes]) -> None:
        """Waits until none of these blocks is being copied. Raises the error of a copy that failed because `source` did
        not answer.
        """
        while copies := {self._copies[one] for one in hashes if one in self._copies}:
            await asyncio.wait({copy.ended for copy in copies})  # does not cancel the futures if it is cancelled
            for copy in copies:
                if copy.source == source and (error := copy.ended.result()) is not None:
                    raise error
