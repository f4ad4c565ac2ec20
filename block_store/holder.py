"""A worker's live incarnation in the ledger: its epoch, its lease kept by a beat thread, and its ordered lane of calls.

The lane: mutating calls carry a running number, one at a time. A call that got no answer is repeated with the same
number, and before any later call, so that each happens once. Knows nothing of sequences; `held.HeldBlocks` counts
those.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from block_store.codec import SealItem
from block_store.errors import Fenced, LedgerError, LedgerUnavailable, StaleDataset
from block_store.ledger import LEASE_S, TICKET_LEASE_S, Lane, Ledger
from common.types import BlockRef, Epoch

_LOG = logging.getLogger(__name__)
BEAT_S = 1.0
ANSWER_TIMEOUT_S = 3.0
_REPEAT_PAUSE_S = 0.02
T = TypeVar("T")


class Holder:
    """Thread-safe. Once fenced every call but `release` and `close` raises Fenced; register a new one with a new writer
    slot.
    """

    def __init__(self, ledger: Ledger, name: str, epoch: Epoch, lease_s: float, answer_timeout_s: float) -> None:
        self.ledger = ledger
        self.name = name
        self.epoch = epoch
        self.fenced = threading.Event()
        self.num_available = 0
        """Blocks that could still be allocated, as of the last beat."""
        self._lease_s = lease_s
        self._answer_timeout_s = answer_timeout_s
        self._lock = threading.Lock()
        self._number = 0
        self._pending: Callable[[Lane], object] | None = None
        self._stop = threading.Event()
        self._on_fenced: Callable[[], None] | None = None
        self._beats: threading.Thread | None = None

    @classmethod
    def register(
        cls, ledger: Ledger, name: str, *, writer_slot: int, floor: int = 0, lease_s: float = LEASE_S,
        beat_s: float | None = BEAT_S, answer_timeout_s: float = ANSWER_TIMEOUT_S,
        on_fenced: Callable[[], None] | None = None,
    ) -> Holder:  # fmt: skip
        """A new holder with its beat thread (`beat_s` None: none). `on_fenced` runs once, in the thread that learns it.

        Errors: FloorsExceedArena, StaleDataset, LedgerUnavailable.
        """
        epoch = ledger.register(name, writer_slot=writer_slot, floor=floor, lease_s=lease_s)
        holder = cls(ledger, name, epoch, lease_s, answer_timeout_s)
        holder._on_fenced = on_fenced
        holder.beat()
        if beat_s is not None:
            holder._beats = threading.Thread(target=holder._beat_on, args=(beat_s,), name=f"beat-{name}", daemon=True)
            holder._beats.start()
        return holder

    def beat(self) -> None:
        """Extends the lease now. Fenced, LedgerUnavailable."""
        try:
            self.num_available = self.ledger.beat(self.epoch, self._lease_s)
        except (Fenced, StaleDataset):
            self._fence()
            raise

    def alloc(self, num_blocks: int) -> list[BlockRef]:
        """RESERVED blocks; raise their header generation before the first store. Fenced, Exhausted."""
        return self._in_lane(lambda lane: self.ledger.alloc(lane, num_blocks))

    def seal(self, items: Sequence[SealItem]) -> list[BlockRef]:
        """The reference to use from now on for each item: its own, or the one that is indexed already (then both are
        held).
        """
        return self._in_lane(lambda lane: self.ledger.seal(lane, items))

    def acquire(self, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """References on the longest prefix that is there for every group, per group."""
        return self._in_lane(lambda lane: self.ledger.acquire(lane, hashes_by_group))

    def hand_over(
        self, moved: Sequence[BlockRef], kept: Sequence[BlockRef] = (), ticket_lease_s: float = TICKET_LEASE_S
    ) -> Epoch:
        """A ticket on `moved` (given up) and `kept` (still held here too). Fenced, Stale, NotHolder."""
        return self._in_lane(lambda lane: self.ledger.hand_over(lane, moved, kept, ticket_lease_s))

    def claim(self, ticket: Epoch) -> list[BlockRef]:
        """Everything the ticket holds. Fenced, Gone."""
        return self._in_lane(lambda lane: self.ledger.claim(lane, ticket))

    def release(self, refs: Sequence[BlockRef]) -> None:
        """Gives up `refs` (chains head first). Says that writes into them are complete. No refusal, not even when
        fenced.
        """
        try:
            self._in_lane(lambda lane: self.ledger.release(lane, refs))
        except (Fenced, StaleDataset):
            return

    def holdings(self) -> list[BlockRef]:
        """What the ledger says is held here, after a call that is still unanswered was repeated. Fenced."""
        return self._in_lane(lambda lane: self.ledger.holdings(lane.epoch))

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

    def _in_lane(self, operation: Callable[[Lane], T]) -> T:
        with self._lock:
            if self.fenced.is_set():
                raise Fenced(f"holder {self.name} (epoch {self.epoch}) is fenced or closed")
            if self._pending is not None:
                self._settle(self._pending)
            self._number += 1
            return self._until_answered(operation)

    def _settle(self, pending: Callable[[Lane], object]) -> None:
        """Repeats the unanswered call; its caller is gone, so its refusal matters to nobody. What it got shows in
        `holdings`.
        """
        try:
            self._until_answered(pending)
        except (Fenced, StaleDataset, LedgerUnavailable):
            raise
        except LedgerError as refusal:
            _LOG.info("the repeated call was refused: %s", refusal)

    def _until_answered(self, operation: Callable[[Lane], T]) -> T:
        deadline = time.monotonic() + self._answer_timeout_s
        self._pending = operation
        while True:
            try:
                answer = operation(Lane(self.epoch, self._number))
            except LedgerUnavailable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_REPEAT_PAUSE_S)
                continue
            except (Fenced, StaleDataset):
                self._pending = None
                self._fence()
                raise
            except Exception:
                self._pending = None
                raise
            self._pending = None
            return answer

    def _fence(self) -> None:
        if not self.fenced.is_set():
            self.fenced.set()
            if self._on_fenced is not None:
                self._on_fenced()

    def _beat_on(self, beat_s: float) -> None:
        while not self._stop.wait(beat_s):
            try:
                self.beat()
            except LedgerUnavailable as error:
                _LOG.warning("no answer to the beat of %s: %s", self.name, error)
            except (Fenced, StaleDataset) as error:
                _LOG.error("holder %s is fenced: %s", self.name, error)
                return
