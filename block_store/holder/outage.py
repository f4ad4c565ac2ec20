"""A worker's calls of the ledger, and what becomes of those that it does not answer.

Seals and releases that were missed reach the ledger later; `Rejoining` finds out what else the two sides disagree on.
Independent of what the blocks are used for.
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
    """What has methods that are `locked`."""

    @property
    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        """That of the `OutageCalls` behind it."""


L = TypeVar("L", bound=Locked)


def locked(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """A method that must not run between the two halves of a rejoining, nor the rejoining between its own."""

    @wraps(method)
    def run(self: L, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class OutageCalls:
    """Calls of the ledger that may be answered late or never. One thread, and beside it the holder's beat thread."""

    def __init__(self, holder: LedgerClient, arena: Arena) -> None:
        self.holder = holder
        self.arena = arena
        self.lock = threading.RLock()
        self.fallbacks = Fallbacks(_LOG)
        """What was done without the ledger, counted by kind."""
        self.rebuild_count = arena.rebuild_count
        """Of the ledger that the holder is in."""
        self.is_unsure = False
        """The ledger may hold references for us that we know nothing of."""
        self.late_seals: list[list[SealItem]] = []
        """Sealed in the header, not yet in the ledger."""

    def call(self, operation: Callable[[], T]) -> T:
        """One operation of the ledger. After an unanswered one the two sides may differ: `is_unsure`."""
        self.check_fence()
        try:
            self._seal_late()
            return operation()
        except StaleDataset as error:
            self.is_unsure = True
            raise LedgerUnavailable(f"the ledger is built anew: {error}") from error
        except LedgerUnavailable:
            self.is_unsure = True
            raise

    def seal(self, items: Sequence[SealItem]) -> list[BlockRef] | None:
        """As `LedgerClient.seal`; None: the ledger did not answer, it is told later."""
        try:
            return self.call(lambda: self.holder.seal(items))
        except LedgerUnavailable as error:
            self.fallbacks.note("seal not acknowledged", str(error))
            self.late_seals.append(list(items))
            return None

    def release(self, refs: Sequence[BlockRef]) -> None:
        """As `LedgerClient.release`; if the ledger does not answer, it is found later that these are not used here."""
        if not refs:
            return
        try:
            self.call(lambda: self.holder.release(refs))
            self.holder.lease.num_available += len(refs)
        except LedgerUnavailable as error:
            self.fallbacks.note("release not acknowledged", str(error))

    def contradicted(self, reason: str) -> None:
        """The header is ahead of the ledger, so that this is an older one: write nothing, ask for a rebuild. Fenced."""
        self.is_unsure = True
        self.holder.contradict(reason)
        self.fallbacks.note("rebuild asked for", reason)

    def check_fence(self) -> None:
        """Raises Fenced."""
        if self.holder.fenced.is_set():
            raise Fenced(f"holder {self.holder.name} is fenced or closed")

    def _seal_late(self) -> None:
        """Before anything else: blocks that no sequence has any more may still serve others."""
        while self.late_seals and not self.holder.breaker.is_open:
            try:
                self.holder.seal(self.late_seals[0])
                self.is_unsure = True  # the references on blocks that had the hash already
            except Stale as error:
                self.fallbacks.note("late seal refused", str(error))
            self.late_seals.pop(0)
