"""A worker's live incarnation in the ledger: its epoch, its lease kept by a beat thread, and its ordered lane of calls.

The lane: mutating calls carry a running number, one at a time. A call that got no answer is repeated with the same
number, and before any later call, so that each happens once. A call has a budget; when it is spent the breaker opens
and calls fail at once, until a beat gets through. Knows nothing of sequences; `held.HeldBlocks` counts those.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from block_store.breaker import BUDGET_PER_BLOCK_S, BUDGET_S, PROBE_S, Breaker
from block_store.codec import SealItem
from block_store.errors import Fenced, LedgerDamaged, LedgerError, LedgerUnavailable, StaleDataset
from block_store.ledger import LEASE_S, MAX_BATCH, TICKET_LEASE_S, Lane, Ledger, Standing
from common.types import BlockRef, Epoch, TicketId

_LOG = logging.getLogger(__name__)
BEAT_S = 1.0
_REPEAT_PAUSE_S = 0.002
T = TypeVar("T")
Key = tuple[object, ...]
"""What tells a call that is made again from another one."""


class Holder:
    """Thread-safe. Once fenced every call but `release` and `close` raises Fenced; register a new one with a new writer
    slot.

    Errors of all calls: LedgerUnavailable (no answer in time, or the breaker is open), StaleDataset (the ledger was
    built anew, or will be: `on_stale` runs in the beat thread until it says that the holder has rejoined).
    """

    def __init__(
        self, ledger: Ledger, name: str, epoch: Epoch, writer_slot: int, floor: int, lease_s: float, budget_s: float
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
        self._settled: tuple[Key, object] | None = None
        self._joining: tuple[Ledger, Epoch, int] | None = None
        self._stop = threading.Event()
        self._on_fenced: Callable[[], None] | None = None
        self._beats: threading.Thread | None = None

    @classmethod
    def register(
        cls, ledger: Ledger, name: str, *, writer_slot: int, floor: int = 0, lease_s: float = LEASE_S,
        beat_s: float | None = BEAT_S, budget_s: float = BUDGET_S,
        on_fenced: Callable[[], None] | None = None,
    ) -> Holder:  # fmt: skip
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
        try:
            self.num_available, self.census = self.ledger.beat(self.epoch, self._lease_s, self._answered)
        except Fenced:
            self.fence()
            raise

    def alloc(self, num_blocks: int) -> list[BlockRef]:
        """RESERVED blocks; raise their header generation before the first store. Fenced, Exhausted."""
        return self._in_lane(lambda lane: self.ledger.alloc(lane, num_blocks), num_blocks)

    def seal(self, items: Sequence[SealItem]) -> list[BlockRef]:
        """The reference to use from now on for each item: its own, or the one that is indexed already (then both are
        held).
        """
        key = ("seal", *(item.ref for item in items))
        return self._in_lane(lambda lane: self.ledger.seal(lane, items), len(items), key)

    def acquire(self, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """References on the longest prefix that is there for every group, per group."""
        return self._in_lane(lambda lane: self.ledger.acquire(lane, hashes_by_group), sum(map(len, hashes_by_group)))

    def hand_over(
        self, moved: Sequence[BlockRef], kept: Sequence[BlockRef] = (), ticket_lease_s: float = TICKET_LEASE_S
    ) -> TicketId:
        """A ticket on `moved` (given up) and `kept` (still held here too). Fenced, Stale, NotHolder.

        May be made again after LedgerUnavailable: if it happened in the meantime, its ticket is the answer.
        """
        key = ("hand_over", *moved, None, *kept)
        operation = lambda lane: self.ledger.hand_over(lane, moved, kept, ticket_lease_s)  # noqa: E731
        return self._in_lane(operation, len(moved) + len(kept), key)

    def claim(self, ticket: TicketId) -> list[BlockRef]:
        """Everything the ticket holds. Fenced, Gone. May be made again after LedgerUnavailable, like `hand_over`."""
        return self._in_lane(lambda lane: self.ledger.claim(lane, ticket), MAX_BATCH // 16, ("claim", ticket))

    def unfetched(self, ticket: TicketId) -> list[BlockRef]:
        """What an unanswered claim of `ticket` got, as a later call found out; until it is claimed again."""
        key, answer = self._settled or (None, [])
        return cast(list[BlockRef], answer) if key == ("claim", ticket) else []

    def release(self, refs: Sequence[BlockRef]) -> None:
        """Gives up `refs` (chains head first). Says that writes into them are complete. No refusal, not even when
        fenced.
        """
        try:
            self._in_lane(lambda lane: self.ledger.release(lane, refs), len(refs))
        except Fenced:
            return

    def holdings(self) -> list[BlockRef]:
        """What the ledger says is held here, after a call that is still unanswered was repeated. Fenced."""
        return self._in_lane(lambda lane: self.ledger.holdings(lane.epoch), MAX_BATCH // 16, changes=False)

    def contradict(self, reason: str) -> None:
        """Of blocks that the ledger gave this holder the header says that they live another life: as `distrust`.

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

    def rejoin(self, dataset: str, refs: Sequence[BlockRef]) -> list[Standing]:
        """Registers under a ledger that was built anew and asserts `refs`: everything that is held, may be written, or
        is in reserve here. From then on calls go to that ledger.

        Errors: as `register`; nothing has changed then, and the next try goes on where this one ended.
        """
        with self._lock:
            if self._joining is None or self._joining[0].dataset != dataset:
                ledger = self.ledger.under(dataset)
                epoch = ledger.register(
                    self.name, writer_slot=self._writer_slot, floor=self._floor, lease_s=self._lease_s
                )
                self._joining = (ledger, epoch, 0)
            standings = self._assert_all(refs)
            self.ledger, self.epoch, self._number = self._joining
            self._answered = self._number
            self._joining = self._pending = self._settled = None
        return standings

    def _assert_all(self, refs: Sequence[BlockRef]) -> list[Standing]:
        """A try that failed half-way is made again from the start: asserting twice is like asserting once."""
        assert self._joining is not None
        ledger, epoch, number = self._joining
        standings: list[Standing] = []
        try:
            for first in range(0, max(1, len(refs)), MAX_BATCH):
                number += 1
                self._joining = (ledger, epoch, number)
                part, is_last = refs[first : first + MAX_BATCH], first + MAX_BATCH >= len(refs)
                standings += ledger.assert_held(Lane(epoch, number), part, is_last)
        except (Fenced, StaleDataset):
            self._joining = None
            raise
        return standings

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

    def _in_lane(
        self, operation: Callable[[Lane], T], num_blocks: int, key: Key | None = None, changes: bool = True
    ) -> T:
        """`changes` False: a reading, which takes no number."""
        budget_s = self._budget_s + num_blocks * BUDGET_PER_BLOCK_S
        with self._lock:
            if self.fenced.is_set():
                raise Fenced(f"holder {self.name} (epoch {self.epoch}) is fenced or closed")
            if self.breaker.refuses():
                raise LedgerUnavailable(f"{self.name} goes on without the ledger")
            if self._pending is not None:
                self._settle(*self._pending, budget_s)
            if self._settled is not None and self._settled[0] == key:
                answer, self._settled = self._settled[1], None
                return cast(T, answer)
            self._number += changes
            self._pending = (key, operation)
            return self._until_answered(operation, budget_s)

    def _settle(self, key: Key | None, pending: Callable[[Lane], object], budget_s: float) -> None:
        """Repeats the unanswered call. Its answer is kept for whoever makes the same call again; its refusal matters to
        nobody; what it got else shows in `holdings`.
        """
        try:
            answer = self._until_answered(pending, budget_s)
        except (Fenced, StaleDataset, LedgerUnavailable):
            raise
        except LedgerError as refusal:
            _LOG.info("the repeated call was refused: %s", refusal)
        else:
            if key is not None:
                self._settled = (key, answer)

    def _until_answered(self, operation: Callable[[Lane], T], budget_s: float) -> T:
        deadline = time.monotonic() + budget_s
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
            except LedgerDamaged as error:
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
        """Nothing is this holder's any more; tells whoever asked to be told, once."""
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
        while not self._stop.wait(PROBE_S if self.breaker.is_open else beat_s) and not self.fenced.is_set():
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
                self.breaker.close()
        except LedgerError as error:
            _LOG.warning("holder %s cannot join the new ledger yet: %s", self.name, error)
