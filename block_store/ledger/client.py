"""A worker's live incarnation in the ledger: its epoch, its lease kept by a beat thread, and its ordered lane of calls.

The lane: mutating calls carry a running number, one at a time. A call that got no answer is repeated with the same
number, and before any later call, so that each happens once. A call has a budget; when it is spent the breaker opens
and calls fail at once, until a beat gets through. What is over more blocks than one call takes is made in several.
Independent of sequences; `HeldBlocks` counts those.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar, cast

from block_store.errors import (
    Exhausted,
    Fenced,
    Gone,
    LedgerDamaged,
    LedgerError,
    LedgerUnavailable,
    OutOfOrder,
    StaleDataset,
)
from block_store.ledger.breaker import BUDGET_S, PROBE_S, Breaker
from block_store.ledger.codec import SealItem
from block_store.ledger.joining import Joining
from block_store.ledger.scripts import (
    CHUNK,
    LEASE_S,
    RELEASE_CHUNK,
    TICKET_LEASE_S,
    Lane,
    LedgerScripts,
    Standing,
    chunks,
)
from common.telemetry import Fallbacks
from common.ticket import TicketId
from common.types import BlockRef, Epoch

_LOG = logging.getLogger(__name__)
BEAT_S = 1.0
_REPEAT_PAUSE_S = 0.002
T = TypeVar("T")
Key = tuple[object, ...]
"""What tells a call that is made again from another one."""
MOST_PROBE_PAUSE_S = 8 * PROBE_S
"""A new ledger that does not let a holder in is tried ever more rarely, down to this."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One hand-over or one claim, over all its calls and their repetitions: answers to them are for nobody else.

    A caller that makes it again after LedgerUnavailable passes the same object; one that does not, says so by
    `LedgerClient.forget`.
    """

    ticket: TicketId | None = None
    """That a hand-over has begun."""
    refs: list[BlockRef] = field(default_factory=list)
    """That a claim has got."""
    num_answered: int = 0
    is_over: bool = False


class LedgerClient:
    """Thread-safe. Once fenced every call but `release` and `close` raises Fenced; register a new one with a new writer
    slot.

    Errors of all calls: LedgerUnavailable (no answer in time, or the breaker is open), StaleDataset (the ledger was
    built anew, or will be: `on_stale` runs in the beat thread until it says that the holder has rejoined).
    """

    def __init__(
        self,
        ledger: LedgerScripts,
        name: str,
        epoch: Epoch,
        writer_slot: int,
        floor: int,
        lease_s: float,
        budget_s: float,
    ) -> None:
        self.ledger = ledger
        self.name = name
        self.epoch = epoch
        self.fenced = threading.Event()
        self.breaker = Breaker(name)
        self.on_stale: Callable[[], bool] = lambda: False
        self.on_answer: Callable[[], object] = lambda: None
        """Runs in the beat thread after every beat that was answered."""
        self.num_available = 0
        """Blocks that could still be allocated as of the last beat; `link` counts from there on."""
        self.census = ""
        """The census that the last beat heard of; empty: none."""
        self._writer_slot = writer_slot
        self._floor = floor
        self._lease_s = lease_s
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self._number = 0
        self._answered = 0
        self._pending: tuple[Key | None, Callable[[Lane], object]] | None = None
        self._settled: dict[Key, object] = {}
        """Answers to unanswered calls, as later ones found them out, for those who make them again."""
        self._joining: Joining | None = None
        self._beaten_at = 0.0
        self._probe_pause_s = PROBE_S
        self._fallbacks = Fallbacks(_LOG)
        self._stop = threading.Event()
        self._on_fenced: Callable[[], None] | None = None
        self._beats: threading.Thread | None = None

    @classmethod
    def register(
        cls, ledger: LedgerScripts, name: str, *, writer_slot: int, floor: int = 0, lease_s: float = LEASE_S,
        beat_s: float | None = BEAT_S, budget_s: float = BUDGET_S,
        on_fenced: Callable[[], None] | None = None,
    ) -> LedgerClient:  # fmt: skip
        """A new holder with its beat thread (`beat_s` None: none). `on_fenced` runs once, in the thread that learns it.

        Errors: FloorsExceedArena, StaleDataset, LedgerUnavailable.
        """
        epoch = ledger.register(name, writer_slot=writer_slot, floor=floor, lease_s=lease_s)
        holder = cls(ledger, name, epoch, writer_slot, floor, lease_s, budget_s)
        holder._on_fenced = on_fenced
        holder.beat()
        if beat_s is not None:
            holder._beats = threading.Thread(target=holder._beat_on, args=(beat_s,), name=f"beat-{name}", daemon=True)
            holder._beats.start()
        return holder

    def beat(self) -> None:
        """Extends the lease now."""
        self._beaten_at = time.monotonic()
        try:
            self.num_available, self.census = self.ledger.beat(self.epoch, self._lease_s, self._answered)
        except Fenced:
            self.fence()
            raise

    def keep_lease(self) -> None:
        """Beat if the last beat is a while ago; called during long work in the beat thread."""
        if time.monotonic() - self._beaten_at > self._lease_s / 5:
            self.beat()

    def alloc(self, num_blocks: int) -> list[BlockRef]:
        """RESERVED blocks; raise their header generation before the first store. Fenced, Exhausted: none taken."""
        refs: list[BlockRef] = []
        try:
            while (wanted := num_blocks - len(refs)) > 0:
                refs += self._in_lane(
                    lambda lane, wanted=wanted: self.ledger.alloc(lane, min(CHUNK, wanted), wanted)  # type: ignore[misc]
                )
        except Exhausted:
            self.release(refs)
            raise
        return refs

    def seal(self, items: Sequence[SealItem]) -> list[BlockRef]:
        """The reference to use from now on for each item, of which there are at most CHUNK: its own, or the one that is
        indexed already (then both are held).
        """
        # In a generation a block is sealed once: every seal of it is the same call.
        key = ("seal", *(item.ref for item in items))
        return self._in_lane(lambda lane: self.ledger.seal(lane, items), key)

    def acquire(self, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """References on the longest prefix that is there for every group, per group; at most CHUNK hashes."""
        return self._in_lane(lambda lane: self.ledger.acquire(lane, hashes_by_group))

    def hand_over(self, refs: Sequence[BlockRef], attempt: Attempt, ticket_lease_s: float = TICKET_LEASE_S) -> TicketId:
        """A ticket on `refs`, which are still held here too. Fenced, Stale, NotHolder; after LedgerUnavailable it may
        be made again.
        """
        while attempt.ticket is None or attempt.num_answered * CHUNK < len(refs):
            first = attempt.num_answered * CHUNK
            part = refs[first : first + CHUNK]
            try:
                attempt.ticket = self._in_lane(
                    lambda lane, part=part: self.ledger.hand_over(lane, part, ticket_lease_s, attempt.ticket),  # type: ignore[misc]
                    (attempt, attempt.num_answered),
                )
            except Gone:  # its lease ended between two calls, or the ledger was built anew
                attempt.ticket, attempt.num_answered = None, 0
            else:
                attempt.num_answered += 1
        return attempt.ticket

    def claim(self, ticket: TicketId, attempt: Attempt) -> list[BlockRef]:
        """Everything the ticket holds. Fenced, Gone; after LedgerUnavailable it may be made again. Until it is over,
        `attempt.refs` has what it got, and `unfetched` what it has got unheard.
        """
        more = True
        while more:
            part, more = self._in_lane(lambda lane: self.ledger.claim(lane, ticket), (attempt, attempt.num_answered))
            attempt.refs += part
            attempt.num_answered += 1
        return attempt.refs

    def unfetched(self, attempt: Attempt) -> list[BlockRef]:
        """What an unanswered call of this claim got, as a later call found out; until it is made again."""
        part, _ = cast(tuple[list[BlockRef], bool], self._settled.get((attempt, attempt.num_answered), ([], False)))
        return part

    def forget(self, attempt: Attempt) -> None:
        """Nobody makes this hand-over or claim again: a ticket that it has begun, or is found to have begun, is ended.
        What a claim has got is for the caller to release.
        """
        attempt.is_over = True
        with self._lock:
            late = self._settled.pop((attempt, attempt.num_answered), None)
        for ticket in (attempt.ticket, late):
            if isinstance(ticket, TicketId):
                self.give_up(ticket)

    def give_up(self, ticket: TicketId) -> None:
        """Ends a ticket; if the ledger does not answer it is left to its lease."""
        try:
            if not self.breaker.refuses():
                self.ledger.give_up(ticket)
        except LedgerError as error:
            _LOG.info("ticket %d is left to its lease: %s", ticket.epoch, error)

    def release(self, refs: Sequence[BlockRef]) -> None:
        """Gives up `refs` (chains head first, let go of from their tails on). Says that writes into them are complete.
        No refusal, not even when fenced.
        """
        try:
            for part in reversed(list(chunks(refs, RELEASE_CHUNK))):
                self._in_lane(lambda lane, part=part: self.ledger.release(lane, part))  # type: ignore[misc]
        except Fenced:
            return

    def holdings_after(self, place: int) -> tuple[list[BlockRef], int]:
        """As of the ledger, after a call that is still unanswered was repeated. Fenced."""
        return self._in_lane(lambda lane: self.ledger.holdings_after(lane.epoch, place), changes=False)

    def holdings(self) -> list[BlockRef]:
        """What the ledger says is held here, all of it. Fenced."""
        return self._in_lane(lambda lane: self.ledger.holdings(lane.epoch), changes=False)

    def holds(self, refs: Sequence[BlockRef]) -> list[bool]:
        """Which of at most CHUNK references the ledger says are held here. Fenced."""
        return self._in_lane(lambda lane: self.ledger.holds(lane.epoch, refs), changes=False)

    def contradict(self, reason: str) -> None:
        """Of blocks that the ledger gave this holder the header says that they were reallocated: as `distrust`.

        Fenced: the lease was over, so that others may have got them.
        """
        try:
            self.ledger.distrust(self.epoch)
        except Fenced:
            self.fence()
            raise
        except LedgerError as error:
            _LOG.warning("could not ask for a rebuild: %s", error)
        self.breaker.open(f"it must be built anew: {reason}")

    def distrust(self, reason: object) -> None:
        """The ledger is not to be believed: has it built anew, and goes on without it until it is."""
        self.breaker.open(f"it must be built anew: {reason}")
        try:
            self.ledger.distrust()
        except LedgerError as error:
            _LOG.warning("could not ask for a rebuild: %s", error)

    def assert_held(self, dataset: str, refs: Sequence[BlockRef]) -> dict[BlockRef, Standing]:
        """Registers under a ledger that was built anew and asserts `refs` there: everything that is held, may be
        written, or is in reserve here. Calls go there from `join` on. Takes no lock; for one thread.

        Errors: as `register`; the next try goes on where this one ended.
        """
        if self._joining is None or self._joining.ledger.dataset != dataset:
            self._joining = Joining(self.ledger.under(dataset))
        try:
            self._joining.register(self.name, self._writer_slot, self._floor, self._lease_s)
            return self._joining.assert_all(refs, self._lease_s)
        except (Fenced, StaleDataset):
            self._joining = None
            raise
        except LedgerDamaged:
            with suppress(LedgerError):
                self._joining.ledger.distrust()
            raise

    def join(self) -> None:
        """Calls go to the ledger in which everything was asserted. What was under way in the old one is over."""
        assert self._joining is not None and self._joining.epoch is not None
        with self._lock:
            self.ledger, self.epoch, self._number = self._joining.ledger, self._joining.epoch, self._joining.number
            self._answered = self._number
            self._joining = self._pending = None
            self._settled.clear()

    def close(self) -> None:
        """Ends the beats and gives everything back. Say so only when this process writes no more."""
        self._stop.set()
        if self._beats is not None and self._beats is not threading.current_thread():
            self._beats.join()
        try:
            self.ledger.unregister(self.epoch)
        except LedgerError as error:
            _LOG.warning("holder %s could not unregister, its lease will run out: %s", self.name, error)
        self.fenced.set()

    def _in_lane(self, operation: Callable[[Lane], T], key: Key | None = None, changes: bool = True) -> T:
        """`key` None: nobody makes this call again. `changes` False: a reading, which takes no number."""
        self._check_open()  # without the lock: a call that waits for an answer holds it
        with self._lock:
            self._check_open()
            if self._pending is not None:
                self._settle(*self._pending)
            if key in self._settled:
                return cast(T, self._settled.pop(key))
            self._number += changes
            self._pending = (key, operation)
            return self._until_answered(operation)

    def _check_open(self) -> None:
        if self.fenced.is_set():
            raise Fenced(f"holder {self.name} (epoch {self.epoch}) is fenced or closed")
        if self.breaker.refuses():
            raise LedgerUnavailable(f"{self.name} goes on without the ledger")

    def _settle(self, key: Key | None, pending: Callable[[Lane], object]) -> None:
        """Repeats the unanswered call. Its answer is kept for the caller that makes the same call again; its refusal
        matters to nobody; what it got else shows in `holdings`.
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
        elif isinstance(answer, TicketId):
            self.give_up(answer)

    def _until_answered(self, operation: Callable[[Lane], T]) -> T:
        deadline = time.monotonic() + self._budget_s
        while True:
            try:
                answer = operation(Lane(self.epoch, self._number))
            except LedgerUnavailable as error:
                if time.monotonic() >= deadline:
                    self.breaker.open(error)
                    raise
                time.sleep(_REPEAT_PAUSE_S)
                continue
            except StaleDataset as error:
                self.breaker.open(error)
                raise
            except (LedgerDamaged, OutOfOrder) as error:  # there is one lane a holder: its number was changed
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
            self._pending, self._answered = None, self._number
            return answer

    def fence(self) -> None:
        """Nothing is this holder's any more; calls `on_fenced` once."""
        if not self.fenced.is_set():
            self.fenced.set()
            if self._on_fenced is not None:
                self._on_fenced()

    def probe(self) -> None:
        """What the beat thread does: beat, rejoin if the ledger was built anew, open or close the breaker. Fenced."""
        try:
            self.beat()
            self.breaker.close()
            self.on_answer()
        except StaleDataset as error:
            self.breaker.open(error)
            self._rejoin()
        except LedgerDamaged as error:
            self.distrust(error)
        except LedgerUnavailable as error:
            self.breaker.open(error)

    def _beat_on(self, beat_s: float) -> None:
        while not self._stop.wait(self._probe_pause_s if self.breaker.is_open else beat_s) and not self.fenced.is_set():
            try:
                self.probe()
            except Fenced as error:
                _LOG.error("holder %s is fenced: %s", self.name, error)
            except Exception:  # a lease that nobody renews costs every request here
                _LOG.exception("a beat of %s failed; the next one comes", self.name)

    def _rejoin(self) -> None:
        try:
            if self.on_stale():
                _LOG.warning("holder %s is in the new ledger, as epoch %d", self.name, self.epoch)
                self._probe_pause_s = PROBE_S
                self.breaker.close()
        except LedgerError as error:
            self._probe_pause_s = min(2 * self._probe_pause_s, MOST_PROBE_PAUSE_S)
            self._fallbacks.note("new ledger not joined yet", f"{self.name}: {error}")
