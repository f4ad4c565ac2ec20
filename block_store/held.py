"""What a worker's step thread uses of the block store: blocks, counted by how many of its sequences share them.

A ledger reference is (holder, block, generation), once. Here is the count beside it; the ledger hears of a block when
its first sequence comes and its last one goes. Keeps a reserve of RESERVED blocks, so that a decode step rarely needs a
call.

One thread at a time. Knows nothing of sequences or tensors. Once fenced every method raises Fenced: abort the
sequences, close the writer slot, register anew.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from block_store.arena import Arena
from block_store.codec import SealItem
from block_store.errors import Exhausted, Fenced, LedgerUnavailable, NotHolder, Stale
from block_store.holder import Holder
from block_store.ledger import MAX_BATCH
from block_store.writer_slots import WriterSlot
from common.types import BlockRef, Epoch, Ticket

Tables = Sequence[Sequence[Sequence[BlockRef]]]
"""tables[branch][group] is a block table."""
T = TypeVar("T")


class HeldBlocks:
    """The blocks of one worker in one arena."""

    def __init__(self, holder: Holder, arena: Arena, writer_slot: WriterSlot, reserve: int = 0) -> None:
        self.holder = holder
        self.arena = arena
        self.writer_slot = writer_slot
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
        return len(self._reserve) + self.holder.num_available

    def count(self, ref: BlockRef) -> int:
        """How many sequences here share `ref`."""
        return self._counts.get(ref, 0)

    def alloc(self, num_blocks: int) -> list[BlockRef]:
        """Blocks to write into, header raised (writer rule). Exhausted: none taken. HeaderAheadError: write nothing."""
        if num_blocks > len(self._reserve):
            self._refill(num_blocks)
        self._check_fence()
        refs = [self._reserve.popleft() for _ in range(num_blocks)]
        try:
            self.arena.raise_generations(refs, self.writer_slot.number)
        except BaseException:
            self._call(lambda: self.holder.release(refs))
            raise
        self._counts.update(refs)
        return refs

    def top_up(self) -> None:
        """Fills the reserve, as far as blocks can be had; for a moment when nobody waits."""
        try:
            self._refill(0)
        except Exhausted:
            return

    def give_up_reserve(self) -> None:
        """Returns the reserve to everybody."""
        refs = list(self._reserve)
        self._reserve.clear()
        self._release_all(refs)

    def acquire(self, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """The longest cached prefix, per group; every block of it counts one more sequence."""
        refs_by_group = self._call(lambda: self.holder.acquire(hashes_by_group))
        for refs in refs_by_group:
            self._counts.update(refs)
        return refs_by_group

    def seal(self, items: Sequence[SealItem]) -> list[BlockRef]:
        """Publishes blocks whose content is final; returns the reference to put into the block table for each.

        Where another block has the hash already, that one is meant: the own block is released, its count moved. Errors:
        Stale and HeaderMismatch (discard what was written, prefill again), NotHolder.
        """
        self._expect(item.ref for item in items)
        refs = [item.ref for item in items]
        self.arena.mark_sealed(refs, [item.prefix_hash for item in items], self.arena.seal_digests(refs))
        final = self._call(lambda: self.holder.seal(items))
        doubles = [(own, other) for own, other in zip(refs, final, strict=True) if own != other]
        for own, other in doubles:
            self._counts[other] += self._counts.pop(own)
        self._release_all([own for own, _ in doubles])
        return final

    def share(self, refs: Iterable[BlockRef]) -> None:
        """One more sequence uses each of `refs` (a fork). No call."""
        refs = list(refs)
        self._expect(refs)
        self._counts.update(refs)

    def release(self, refs: Sequence[BlockRef]) -> None:
        """One sequence gives up its block table (head first)."""
        self.release_many([refs])

    def release_many(self, tables: Iterable[Sequence[BlockRef]]) -> None:
        """`release` for several block tables with one call."""
        self._check_fence()
        self._release_all(self._uncount(tables)[0])

    def hand_over(self, tables: Tables) -> Epoch:
        """A ticket for these block tables, every block sealed; each table's sequence gives its blocks up.

        Blocks that other sequences here share stay held too. Errors: Stale, NotHolder; then nothing has changed.
        """
        self._check_fence()
        flat = [table for branch in tables for table in branch]
        before = self._counts.copy()
        moved, kept = self._uncount(flat)
        try:
            return self._call(lambda: self.holder.hand_over(moved, kept))
        except (Stale, NotHolder):
            self._counts = before
            raise

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
        self._counts.clear()
        self._reserve.clear()
        self.holder.close()
        self.writer_slot.close()

    def _refill(self, num_blocks: int) -> None:
        """At least `num_blocks` in the reserve, the target beyond them if it can be had."""
        self._check_fence()
        missing = num_blocks - len(self._reserve)
        wanted = missing + self._reserve_target
        if wanted <= 0:
            return
        try:
            self._reserve.extend(self._call(lambda: self.holder.alloc(min(wanted, max(missing, MAX_BATCH)))))
        except Exhausted:
            if missing <= 0 or missing == wanted:
                raise
            self._reserve.extend(self._call(lambda: self.holder.alloc(missing)))

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
            self._call(lambda part=part: self.holder.release(part))  # type: ignore[misc]

    def _call(self, operation: Callable[[], T]) -> T:
        """One ledger call. After an unanswered one the two sides may differ: the ledger's surplus is released first."""
        self._check_fence()
        try:
            if self._unsure:
                self._reconcile()
            return operation()
        except LedgerUnavailable:
            self._unsure = True
            raise

    def _reconcile(self) -> None:
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
