"""What a worker's step thread uses of the block store: blocks, counted by how many of its sequences share them.

A ledger reference is (holder, block, generation), once. Here is the count beside it; the ledger hears of a block when
its first sequence comes and its last one goes. Keeps a reserve of RESERVED blocks, so that a decode step rarely needs a
call.

One thread at a time; beside it the holder's beat thread calls `rejoin`. Knows nothing of sequences or tensors. Once
fenced every method raises Fenced: abort the sequences, close the writer slot, register anew.

While the ledger does not answer (DESIGN section 5, "Without Redis"): blocks come from the reserve, then
LedgerUnavailable says to wait; no prefix is found; seals and releases reach the ledger later; hand-overs and claims
wait (LedgerUnavailable: nothing has changed, try again).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from block_store.arena import Arena
from block_store.codec import SealItem
from block_store.errors import (
    ArenaLost,
    Exhausted,
    Fenced,
    HeaderAheadError,
    LedgerUnavailable,
    NotHolder,
    Stale,
    StaleDataset,
)
from block_store.header import FixedHeader
from block_store.holder import Holder
from block_store.ledger import MAX_BATCH, Standing
from block_store.writer_slots import WriterSlot
from common.telemetry import Fallbacks
from common.types import BlockRef, Epoch, Ticket

_LOG = logging.getLogger(__name__)
Tables = Sequence[Sequence[Sequence[BlockRef]]]
"""tables[branch][group] is a block table."""
T = TypeVar("T")
P = ParamSpec("P")


def _locked(method: Callable[Concatenate[HeldBlocks, P], T]) -> Callable[Concatenate[HeldBlocks, P], T]:
    """For whatever must not come between the two halves of a rejoining, nor it between theirs."""

    @wraps(method)
    def run(self: HeldBlocks, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


class HeldBlocks:
    """The blocks of one worker in one arena."""

    def __init__(self, holder: Holder, arena: Arena, writer_slot: WriterSlot, reserve: int = 0) -> None:
        self.holder = holder
        self.arena = arena
        self.writer_slot = writer_slot
        self.fallbacks = Fallbacks(_LOG)
        """What was done without the ledger, counted by kind."""
        self._lock = threading.RLock()
        self._rebuild_count = arena.rebuild_count
        self._late_seals: list[list[SealItem]] = []
        """Sealed in the header, not yet in the ledger."""
        holder.on_stale = self.rejoin
        self._reserve_target = reserve
        self._reserve: deque[BlockRef] = deque()
        self._counts: Counter[BlockRef] = Counter()
        self._unsure = False

    @property
    def epoch(self) -> Epoch:
        """The incarnation that holds them."""
        return self.holder.epoch

    @property
    def num_held(self) -> int:
        """Blocks in use by sequences here."""
        return len(self._counts)

    @property
    def num_reserved(self) -> int:
        return len(self._reserve)

    @property
    def num_free_hint(self) -> int:
        """Blocks that `alloc` can probably give: the reserve, and what the ledger had at the last beat."""
        return len(self._reserve) + (0 if self.holder.breaker.is_open else self.holder.num_available)

    def count(self, ref: BlockRef) -> int:
        """How many sequences here share `ref`."""
        return self._counts.get(ref, 0)

    @_locked
    def alloc(self, num_blocks: int) -> list[BlockRef]:
        """Blocks to write into, header raised (writer rule). Exhausted, LedgerUnavailable: none taken."""
        if num_blocks > len(self._reserve):
            self._refill(num_blocks)
        self._check_fence()
        refs = [self._reserve.popleft() for _ in range(num_blocks)]
        self._counts.update(refs)
        return refs

    @_locked
    def top_up(self) -> None:
        """Fills the reserve, as far as blocks can be had; for a moment when nobody waits."""
        try:
            self._refill(0)
        except (Exhausted, LedgerUnavailable):
            return

    @_locked
    def give_up_reserve(self) -> None:
        """Returns the reserve to everybody."""
        refs = list(self._reserve)
        self._reserve.clear()
        self._release_all(refs)

    @_locked
    def acquire(self, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """The longest cached prefix, per group; every block of it counts one more sequence. Without the ledger none."""
        try:
            refs_by_group = self._call(lambda: self.holder.acquire(hashes_by_group))
        except LedgerUnavailable as error:
            self.fallbacks.note("no prefix looked up", str(error))
            return [[] for _ in hashes_by_group]
        for refs in refs_by_group:
            self._counts.update(refs)
        if not all(map(self.arena.check_refs, refs_by_group)):
            self.release_many(refs_by_group)
            self._contradicted("an indexed block lives another life")
            return [[] for _ in hashes_by_group]
        return refs_by_group

    @_locked
    def seal(self, items: Sequence[SealItem]) -> list[BlockRef]:
        """Publishes blocks whose content is final; returns the reference to put into the block table for each.

        Where another block has the hash already, that one is meant: the own block is released, its count moved. Without
        the ledger the block is sealed in the header only, and in the ledger later. Errors: Stale and HeaderMismatch
        (discard what was written, prefill again), NotHolder.
        """
        self._expect(item.ref for item in items)
        refs = [item.ref for item in items]
        self.arena.mark_sealed(refs, [item.prefix_hash for item in items], self.arena.seal_digests(refs))
        try:
            final = self._call(lambda: self.holder.seal(items))
        except LedgerUnavailable as error:
            self.fallbacks.note("seal not acknowledged", str(error))
            self._late_seals.append(list(items))
            return refs
        doubles = [(own, other) for own, other in zip(refs, final, strict=True) if own != other]
        for own, other in doubles:
            self._counts[other] += self._counts.pop(own)
        self._release_all([own for own, _ in doubles])
        return final

    @_locked
    def share(self, refs: Iterable[BlockRef]) -> None:
        """One more sequence uses each of `refs` (a fork). No call."""
        refs = list(refs)
        self._expect(refs)
        self._counts.update(refs)

    def release(self, refs: Sequence[BlockRef]) -> None:
        """One sequence gives up its block table (head first)."""
        self.release_many([refs])

    @_locked
    def release_many(self, tables: Iterable[Sequence[BlockRef]]) -> None:
        """`release` for several block tables with one call."""
        self._check_fence()
        self._release_all(self._uncount(tables)[0])

    @_locked
    def hand_over(self, tables: Tables) -> Epoch:
        """A ticket for these block tables, every block sealed; each table's sequence gives its blocks up.

        Blocks that other sequences here share stay held too. Errors: Stale, NotHolder, LedgerUnavailable (try again
        with the same tables); then nothing has changed.
        """
        self._check_fence()
        flat = [table for branch in tables for table in branch]
        before = self._counts.copy()
        moved, kept = self._uncount(flat)
        try:
            return self._call(lambda: self.holder.hand_over(moved, kept))
        except (Stale, NotHolder, LedgerUnavailable):
            self._counts = before
            raise

    @_locked
    def claim(self, ticket: Ticket) -> Tables:
        """Takes over the ticket's block tables. Gone: claimed already or expired. Stale: it holds less than it says."""
        if ticket.arena_id != self.arena.arena_id:
            raise ValueError(f"the ticket is for arena {ticket.arena_id}, this one is {self.arena.arena_id}")
        claimed = self._call(lambda: self.holder.claim(Epoch(ticket.epoch)))
        named = [ref for branch in ticket.tables for table in branch for ref in table]
        if not set(named) <= set(claimed):
            self._release_all([ref for ref in claimed if ref not in self._counts])
            raise Stale("the ticket names blocks that it does not hold")
        self._counts.update(named)
        self._release_all([ref for ref in claimed if ref not in self._counts])
        return ticket.tables

    def assert_idle(self) -> None:
        """AssertionError unless nothing is held but the reserve, here and in the ledger."""
        assert not self._counts, f"{len(self._counts)} blocks are still counted: {dict(self._counts)}"
        ledger_side = set(self._call(self.holder.holdings))
        assert ledger_side == set(self._reserve), f"the ledger also has {ledger_side - set(self._reserve)}"

    def close(self) -> None:
        """Gives everything back and ends the holder and the writer slot. Only when no step runs any more."""
        self.holder.close()  # joins the beat thread, which may want the lock
        self._counts.clear()
        self._reserve.clear()
        self.writer_slot.close()

    def rejoin(self) -> bool:
        """Asserts what is held here in the ledger that the header names, if that is another one than before.

        False: there is none yet, or (then the holder is fenced) there will be none. Errors: LedgerError; try again. In
        the beat thread, while a step may run: what it writes into is among what is asserted.
        """
        fixed = self._settled_page()
        if fixed.is_lost:
            self.holder.fence()
            return False
        if fixed.dataset == self.holder.ledger.dataset:
            return False
        with self._lock:
            refs = [*self._counts, *self._reserve]
            standings = self.holder.rejoin(fixed.dataset, refs)
            self._rebuild_count = fixed.rebuild_count
            self._settle_standings(dict(zip(refs, standings, strict=True)))
            self._unsure = True  # late seals
        return True

    def _settled_page(self) -> FixedHeader:
        """The header's fixed page, not while it is being written."""
        while (page := self.arena.fixed) != self.arena.fixed:
            continue
        return page

    def _settle_standings(self, standings: dict[BlockRef, Standing]) -> None:
        """What was lost can still be read, by the reader rule, until its header changes; nobody writes into it."""
        self._reserve = deque(ref for ref in self._reserve if standings[ref] is Standing.UNSEALED)
        late = [[item for item in items if standings.get(item.ref) is Standing.UNSEALED] for items in self._late_seals]
        self._late_seals = [items for items in late if items]
        if lost := sum(standing is Standing.LOST for standing in standings.values()):
            self.fallbacks.note("block lost in a rebuild", f"{lost} of {len(standings)}")

    def _refill(self, num_blocks: int) -> None:
        """At least `num_blocks` in the reserve, the target beyond them if it can be had."""
        self._check_fence()
        missing = num_blocks - len(self._reserve)
        wanted = missing + self._reserve_target
        if wanted <= 0:
            return
        try:
            self._take(min(wanted, max(missing, MAX_BATCH)))
        except Exhausted:
            if missing <= 0 or missing == wanted:
                raise
            self._take(missing)

    def _take(self, num_blocks: int) -> None:
        """Blocks of the ledger into the reserve, entered in the header at once: a rebuild must see whose they are."""
        refs = self._call(lambda: self.holder.alloc(num_blocks))
        if self.arena.rebuild_count != self._rebuild_count:
            raise LedgerUnavailable("the ledger is built anew")
        try:
            self.arena.raise_generations(refs, self.writer_slot.number)
        except HeaderAheadError as error:
            if self.arena.is_lost:
                raise ArenaLost(f"arena {self.arena.arena_id} is lost") from error
            self._contradicted(str(error))
            raise LedgerUnavailable(str(error)) from error
        # Whoever began a rebuild since then may not have seen us in the header (`rebuild`): these are not ours.
        if self.arena.rebuild_count != self._rebuild_count:
            raise LedgerUnavailable("the ledger is built anew")
        self._reserve.extend(refs)

    def _contradicted(self, reason: str) -> None:
        """The header is ahead of the ledger, so that this is an older one: write nothing, ask for a rebuild."""
        self.fallbacks.note("rebuild asked for", reason)
        self._unsure = True
        self.holder.distrust(reason)

    def _uncount(self, tables: Iterable[Sequence[BlockRef]]) -> tuple[list[BlockRef], list[BlockRef]]:
        """One sequence less per table. Returns (no sequence left, some left), each in order of first appearance.

        In that order a shared head stands before every tail, so that tails are evicted before heads.
        """
        times: Counter[BlockRef] = Counter()
        for table in tables:
            times.update(table)
        if missing := [ref for ref, n in times.items() if self._counts.get(ref, 0) < n]:
            raise NotHolder(f"block {missing[0].block} is given up more often than it is held")
        gone: list[BlockRef] = []
        kept: list[BlockRef] = []
        for ref, n in times.items():
            self._counts[ref] -= n
            (kept if self._counts[ref] else gone).append(ref)
        for ref in gone:
            del self._counts[ref]
        return gone, kept

    def _release_all(self, refs: Sequence[BlockRef]) -> None:
        for end in range(len(refs), 0, -MAX_BATCH):  # tails first
            part = refs[max(0, end - MAX_BATCH) : end]
            try:
                self._call(lambda part=part: self.holder.release(part))  # type: ignore[misc]
            except LedgerUnavailable as error:  # `_reconcile` makes up for it
                self.fallbacks.note("release not acknowledged", str(error))
                return

    def _call(self, operation: Callable[[], T]) -> T:
        """One ledger call. After an unanswered one the two sides may differ: the ledger's surplus is released first."""
        self._check_fence()
        try:
            if self._unsure:
                self._reconcile()
            return operation()
        except StaleDataset as error:
            self._unsure = True
            raise LedgerUnavailable(f"the ledger is built anew: {error}") from error
        except LedgerUnavailable:
            self._unsure = True
            raise

    def _reconcile(self) -> None:
        """Seals made up for first: blocks that no sequence has any more may still serve others."""
        while self._late_seals:
            try:
                self.holder.seal(self._late_seals[0])
            except Stale as error:
                self.fallbacks.note("late seal refused", str(error))
            self._late_seals.pop(0)
        surplus = [ref for ref in self.holder.holdings() if ref not in self._counts and ref not in self._reserve]
        for first in range(0, len(surplus), MAX_BATCH):
            self.holder.release(surplus[first : first + MAX_BATCH])
        self._unsure = False

    def _expect(self, refs: Iterable[BlockRef]) -> None:
        self._check_fence()
        for ref in refs:
            if ref not in self._counts:
                raise NotHolder(f"block {ref.block} (generation {ref.generation}) is not held here")

    def _check_fence(self) -> None:
        if self.holder.fenced.is_set():
            raise Fenced(f"holder {self.holder.name} is fenced or closed")
