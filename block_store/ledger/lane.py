"""The ordered lane of a holder's ledger calls. A repeated call takes effect only once.

Mutating calls are numbered consecutively and made one at a time. An unanswered call is repeated with the same number
before any later call; the ledger answers a repeated number with the stored reply. A call has a time budget. When the
budget is used up, the breaker opens, and calls fail at once until a beat is answered or the holder has joined a rebuilt
ledger (`lease`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from block_store.errors import Fenced, LedgerDamaged, LedgerError, LedgerUnavailable, OutOfOrder, StaleDataset
from block_store.ledger.breaker import Breaker
from block_store.ledger.scripts import CallId, LedgerScripts
from common.ticket import TicketId
from common.types import BlockRef, Epoch

_LOG = logging.getLogger(__name__)
_REPEAT_PAUSE_S = 0.002
T = TypeVar("T")
Key = tuple[object, ...]
"""The identity of a call that its caller may repeat."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A record of the answers to the calls of one hand-over, delivery or claim.

    To repeat a hand-over or claim after LedgerUnavailable, pass the same object. If it will not be repeated, call
    `LedgerClient.forget`.
    """

    ticket: TicketId | None = None
    """The ticket that a hand-over or a delivery has begun."""
    refs: list[BlockRef] = field(default_factory=list)
    """References that a claim has obtained."""
    num_answered: int = 0
    is_over: bool = False


def ticket_in(answer: object) -> TicketId | None:
    """Returns the ticket in the answer to a hand-over or a delivery, or None if the answer is that of another call."""
    first = answer[0] if isinstance(answer, tuple) else answer
    return first if isinstance(first, TicketId) else None


class OrderedLane:
    """The ordered lane of one incarnation. Thread-safe."""

    def __init__(self, ledger: LedgerScripts, name: str, epoch: Epoch, budget_s: float) -> None:
        self.ledger = ledger
        self.name = name
        self.epoch = epoch
        self.budget_s = budget_s
        """Time in seconds after which an unanswered call is not repeated any more."""
        self.breaker = Breaker(name)
        self.fenced = threading.Event()
        self.on_fenced: Callable[[], None] = lambda: None
        """Callback that runs in the thread that learns of the fence."""
        self.number = 0
        """Number of the last mutating call that was made."""
        self.answered = 0
        """Number of the last mutating call that was answered."""
        self._lock = threading.Lock()
        self._pending: tuple[Key | None, Callable[[CallId], object]] | None = None
        self._settled: dict[Key, object] = {}
        """Late answers to unanswered calls, for the callers that repeat these calls."""

    def call(self, operation: Callable[[CallId], T], key: Key | None = None, changes: bool = True) -> T:
        """Returns the answer to `operation`. Pass a `key` if the caller may repeat the call. If `changes` is False, the
        call is a read, which gets no new number. Raises Fenced if the holder is fenced, LedgerUnavailable if the
        breaker is open or no usable answer arrives in time, StaleDataset if the ledger has been or will be rebuilt, and
        the operation's refusals.
        """
        self._check_open()  # without the lock, which a call that waits for an answer holds
        with self._lock:
            self._check_open()
            if self._pending is not None:
                self._settle(*self._pending)
            if key in self._settled:
                return cast(T, self._settled.pop(key))
            self.number += changes
            self._pending = (key, operation)
            return self._until_answered(operation)

    def settled(self, key: Key) -> object:
        """Returns the late answer to an unanswered call. Returns None if there is none, or if it has been fetched or
        forgotten.
        """
        return self._settled.get(key)

    def forget(self, key: Key) -> object:
        """Discards the late answer to a call, and returns what `settled` would have returned."""
        with self._lock:
            return self._settled.pop(key, None)

    def restart(self, ledger: LedgerScripts, epoch: Epoch, number: int) -> None:
        """Continues in a rebuilt ledger, and discards the unanswered call and the late answers of the old ledger."""
        with self._lock:
            self.ledger, self.epoch, self.number, self.answered = ledger, epoch, number, number
            self._pending = None
            self._settled.clear()

    def fence(self) -> None:
        """Marks the holder as fenced, and calls `on_fenced`. Does nothing if the holder is already fenced."""
        if not self.fenced.is_set():
            self.fenced.set()
            self.on_fenced()

    def distrust(self, reason: object) -> None:
        """Opens the breaker, and requests a rebuild of the ledger, which is damaged."""
        self.breaker.open(f"it must be rebuilt: {reason}")
        try:
            self.ledger.distrust()
        except LedgerError as error:
            _LOG.warning("could not ask for a rebuild: %s", error)

    def give_up(self, ticket: TicketId) -> None:
        """Ends a ticket. If the ledger cannot be used now, the ticket ends with its lease."""
        try:
            if not self.breaker.refuses():
                self.ledger.give_up(ticket)
        except LedgerError as error:
            _LOG.info("ticket %d expires with its lease: %s", ticket.epoch, error)

    def _check_open(self) -> None:
        if self.fenced.is_set():
            raise Fenced(f"holder {self.name} (epoch {self.epoch}) is fenced or closed")
        if self.breaker.refuses():
            raise LedgerUnavailable(f"{self.name} continues without the ledger")

    def _settle(self, key: Key | None, pending: Callable[[CallId], object]) -> None:
        """Repeats the unanswered call. The answer is kept for a caller that repeats the call. If no caller will repeat
        it, a ticket in the answer is ended, and blocks in the answer appear only in `holdings`. A refusal is logged.
        """
        try:
            answer = self._until_answered(pending)
        except (Fenced, StaleDataset, LedgerUnavailable):
            raise
        except LedgerError as refusal:
            _LOG.info("the repeated call was refused: %s", refusal)
            return
        attempt = key[0] if key else None
        if key is not None and not (isinstance(attempt, Attempt) and attempt.is_over):
            self._settled[key] = answer
        elif (ticket := ticket_in(answer)) is not None:
            self.give_up(ticket)

    def _until_answered(self, operation: Callable[[CallId], T]) -> T:
        deadline = time.monotonic() + self.budget_s
        while True:
            try:
                answer = operation(CallId(self.epoch, self.number))
            except LedgerUnavailable as error:
                if time.monotonic() >= deadline:
                    self.breaker.open(error)
                    raise
                time.sleep(_REPEAT_PAUSE_S)
                continue
            except StaleDataset as error:
                self.breaker.open(error)
                raise
            except (LedgerDamaged, OutOfOrder) as error:  # OutOfOrder: a different program has changed the number
                self._pending = None
                self.distrust(error)
                raise LedgerUnavailable(str(error)) from error
            except Fenced:
                self._pending = None
                self.fence()
                raise
            except Exception:
                self._pending = None
                raise
            self._pending, self.answered = None, self.number
            return answer
