"""A worker's calls to the ledger, and the handling of calls that are not answered.

Unanswered seals are repeated later; `Rejoining` finds unanswered releases and other differences.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from block_store.arena.arena import Arena
from block_store.errors import Fenced, LedgerUnavailable, Stale, StaleDataset
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from common.telemetry import Fallbacks
from common.types import BlockRef

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")


class Locked(Protocol):
    """The interface of a class whose methods may be decorated with `locked`."""

    @property
    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        """The lock of the underlying `OutageCalls`."""


L = TypeVar("L", bound=Locked)


def locked(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Decorates a method so that it runs with the lock held."""

    @wraps(method)
    def run(self: L, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class OutageCalls:
    """A wrapper of a ledger client that handles late and missing answers. It is used by one thread of the worker and by
    the holder's beat thread.
    """

    def __init__(self, holder: LedgerClient, arena: Arena) -> None:
        self.holder = holder
        self.arena = arena
        self.lock = threading.RLock()
        self.fallbacks = Fallbacks(_LOG)
        """Numbers of fallbacks, by kind: operations done without the ledger, and consequences of a rebuild."""
        self.rebuild_count = arena.rebuild_count
        """Rebuild count of the ledger in which the holder is registered."""
        self.is_unsure = False
        """Whether the ledger may have references that are missing from this worker's record."""
        self.late_seals: list[list[SealItem]] = []
        """Items sealed in the header but not yet in the ledger."""

    def call(self, operation: Callable[[], T]) -> T:
        """Returns the answer to one operation of the ledger. Repeats unanswered seals first. If the ledger does not
        answer or is being rebuilt, sets `is_unsure`, because the worker's record and the ledger may then differ, and
        raises LedgerUnavailable. Raises Fenced if the holder is fenced.
        """
        self.check_fence()
        try:
            self._seal_late()
            return operation()
        except StaleDataset as error:
            self.is_unsure = True
            raise LedgerUnavailable(f"the ledger is being rebuilt: {error}") from error
        except LedgerUnavailable:
            self.is_unsure = True
            raise

    def seal(self, items: Sequence[SealItem]) -> list[BlockRef] | None:
        """Seals blocks, as `LedgerClient.seal` does. If the ledger does not answer, returns None and repeats the seal
        later.
        """
        try:
            return self.call(lambda: self.holder.seal(items))
        except LedgerUnavailable as error:
            self.fallbacks.note("seal not acknowledged", str(error))
            self.late_seals.append(list(items))
            return None

    def release(self, refs: Sequence[BlockRef]) -> None:
        """Releases blocks, as `LedgerClient.release` does. If the ledger does not answer, `Rejoining` releases `refs`
        later.
        """
        if not refs:
            return
        try:
            self.call(lambda: self.holder.release(refs))
            self.holder.lease.num_available += len(refs)
        except LedgerUnavailable as error:
            self.fallbacks.note("release not acknowledged", str(error))

    def contradicted(self, reason: str) -> None:
        """Requests a rebuild, because the ledger contradicts the arena's header. The caller must not write to its
        blocks. Raises Fenced if the lease has ended.
        """
        self.is_unsure = True
        self.holder.contradict(reason)
        self.fallbacks.note("rebuild asked for", reason)

    def check_fence(self) -> None:
        """Raises Fenced if the holder is fenced."""
        if self.holder.fenced.is_set():
            raise Fenced(f"holder {self.holder.name} is fenced or closed")

    def _seal_late(self) -> None:
        """Repeats the unanswered seals. Blocks that no sequence uses any more are also sealed, because they can serve
        as cached prefixes.
        """
        while self.late_seals and not self.holder.breaker.is_open:
            try:
                self.holder.seal(self.late_seals[0])
                self.is_unsure = True  # the ledger may have added references to blocks that already had the hash
            except Stale as error:
                self.fallbacks.note("late seal refused", str(error))
            self.late_seals.pop(0)
