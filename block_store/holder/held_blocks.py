"""The blocks that a worker holds, with a count of the sequences that share each block (long: steps change blocks only
through this class).

The ledger records a reference (holder, block, generation) once, and `HeldBlocks` counts the sequences. No call is
needed when a sequence is forked, or when one of several sequences releases a shared block. With a reserve of RESERVED
blocks, a decode step rarely needs a call. One thread at a time may use a `HeldBlocks`, in addition to the holder's beat
thread, which fills the reserve and runs `Rejoining`.

Once the holder is fenced, most methods raise Fenced. Abort the sequences, close the writer slot, and register again.
While the ledger does not answer (docs/design.md, Ledger: without Redis), blocks come from the reserve. If the reserve
has too few, `alloc` raises LedgerUnavailable and the caller waits. During this time, no cached prefix is found, and
seals and releases reach the ledger later. Hand-overs and claims raise LedgerUnavailable and leave the worker's record
unchanged, so that the caller can try again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from block_store.arena.arena import Arena
from block_store.arena.writer_slots import WriterSlot
from block_store.errors import LedgerError, LedgerUnavailable, NotHolder, Stale
from block_store.holder.outage import OutageCalls, locked
from block_store.holder.rejoin import Rejoining
from block_store.holder.reserve import Reserve
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.lane import Attempt
from block_store.ledger.scripts import chunks, parts_of
from common.ticket import Ticket, TicketId
from common.types import BlockRef, Epoch

Tables = Sequence[Sequence[Sequence[BlockRef]]]
"""The block tables of a group of sequences: tables[branch][group] is a block table."""


class HeldBlocks:
    """A worker's record of the blocks that it holds in one arena.

    Steps take, share and release blocks only through this class, so that the counts are correct.
    """

    def __init__(self, holder: LedgerClient, arena: Arena, writer_slot: WriterSlot, reserve: int = 0) -> None:
        """Creates the table of counts and the reserve. `reserve` is the minimum number of blocks to keep allocated in
        advance.
        """
        self.holder = holder
        self.arena = arena
        self.writer_slot = writer_slot
        self._counts: Counter[BlockRef] = Counter()
        self._wanted: set[Attempt] = set()
        """Claims that have not been answered and will be repeated."""
        self._calls = OutageCalls(holder, arena)
        self._reserve = Reserve(self._calls, writer_slot, reserve)
        self.rejoining = Rejoining(self._calls, self._reserve, self._counts, self._wanted)
        self.fallbacks = self._calls.fallbacks
        """Numbers of fallbacks, by kind: operations done without the ledger, and consequences of a rebuild."""

    @property
    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        """The lock that most methods hold while they run. The beat thread also takes it."""
        return self._calls.lock

    @property
    def epoch(self) -> Epoch:
        """The epoch of the holder."""
        return self.holder.epoch

    @property
    def num_held(self) -> int:
        """Number of blocks that this worker's sequences use."""
        return len(self._counts)

    @property
    def num_reserved(self) -> int:
        return len(self._reserve)

    @property
    def num_free_hint(self) -> int:
        """The number of blocks that `alloc` can probably return: the reserve plus, unless the breaker is open, the
        ledger's available blocks as of the last beat, adjusted for this worker's later allocations and releases.
        """
        available = 0 if self.holder.breaker.is_open else max(0, self.holder.lease.num_available)
        return min(len(self._reserve) + available, self.arena.num_blocks)

    def count(self, ref: BlockRef) -> int:
        """Returns the number of this worker's sequences that share `ref`."""
        return self._counts.get(ref, 0)

    @locked
    def alloc(self, num_blocks: int, spare: int = 0) -> list[BlockRef]:
        """Returns blocks to write into, with raised header generations (writer rule).

        Raises Exhausted if too few blocks are available, or if the reserve is too small and `spare` more blocks could
        not be allocated afterwards. Raises LedgerUnavailable if the reserve is too small and the ledger cannot be used,
        and ArenaLost if the arena is lost. After an error, the reserve still has its blocks.
        """
        refs = self._reserve.take(num_blocks, spare)
        self._counts.update(refs)
        return refs

    def top_up(self) -> None:
        """Fills the reserve to its target size, as far as blocks are available, or releases a large surplus. The beat
        thread usually does this after an answered beat.
        """
        self._calls.check_fence()
        self._reserve.level()

    def expect(self, num_blocks: int) -> None:
        """Sets the target size of the reserve to `num_blocks`, but to at most an eighth of the arena and at least the
        minimum that was given to the constructor. The next beat fills the reserve, for which the ledger evicts cached
        blocks if necessary.
        """
        self._reserve.expect(num_blocks)

    def give_up_reserve(self) -> None:
        """Returns the reserve to the ledger, so that any worker can allocate its blocks."""
        self._reserve.give_back(len(self._reserve))

    @locked
    def acquire(self, hashes_by_group: Sequence[Sequence[bytes]]) -> list[list[BlockRef]]:
        """Returns, for each group, the blocks of the longest prefix that is indexed for every group, and counts one
        more sequence for each block. The prefix ends before the first block that would use up another worker's floor.
        If the ledger stops answering, returns the blocks found so far. If the header does not have the generation and
        hash of one of the blocks, returns no blocks and requests a rebuild.
        """
        found: list[list[BlockRef]] = [[] for _ in hashes_by_group]
        try:
            for part in parts_of(hashes_by_group):
                refs_by_group = self._calls.call(lambda part=part: self.holder.acquire(part))  # type: ignore[misc]
                for refs, more in zip(found, refs_by_group, strict=True):
                    self._counts.update(more)
                    refs += more
                if len(refs_by_group[0]) < len(part[0]):
                    break
        except LedgerUnavailable as error:
            self.fallbacks.note("no prefix looked up", str(error))
        if not all(map(self.arena.has, found, hashes_by_group)):
            self.release_many(found)
            self._calls.contradicted("an indexed block was reallocated")
            return [[] for _ in hashes_by_group]
        return found

    @locked
    def present(self, hashes: Sequence[bytes]) -> list[bool]:
        """Returns, for each prefix hash, whether a block is indexed under it. If the ledger does not answer, all
        entries are False.
        """
        try:
            return self._calls.call(lambda: self.holder.present(hashes))
        except LedgerUnavailable as error:
            self.fallbacks.note("no prefix looked up", str(error))
            return [False] * len(hashes)

    @locked
    def seal(self, items: Sequence[SealItem], digests: Sequence[int] | None = None) -> list[BlockRef]:
        """Publishes blocks whose content is final. Returns, for each item, the reference to put into the block table.
        `digests` contains the XXH3 digest of each block; if it is None, the digests are computed
        (`Arena.seal_digests`).

        If a different block already has the hash, the returned reference names that block: the worker's own block is
        released, and its count moves to the other block. If the header contradicts such a block, the worker keeps its
        own block, and a rebuild is requested. If the ledger does not answer, the block is sealed in the header now and
        in the ledger later. Raises NotHolder if a block is not held here. After Stale or HeaderMismatch, discard the
        written data and prefill again.
        """
        self._expect(item.ref for item in items)
        refs = [item.ref for item in items]
        made = self.arena.seal_digests(refs) if digests is None else digests
        self.arena.mark_sealed(refs, [item.prefix_hash for item in items], made)
        return [ref for part in chunks(items) for ref in self._seal_in_ledger(part)]

    def _seal_in_ledger(self, items: Sequence[SealItem]) -> list[BlockRef]:
        refs = [item.ref for item in items]
        final = self._calls.seal(items)
        if final is None:
            return refs
        doubles = {item: other for item, other in zip(items, final, strict=True) if item.ref != other}
        hashes = [item.prefix_hash for item in doubles if item.prefix_hash is not None]
        # Without a rebuild, the next seal with this hash would return that block again.
        if len(hashes) < len(doubles) or not self.arena.has([*doubles.values()], hashes):
            self._calls.contradicted("an indexed block was reallocated")
            return refs
        for item, other in doubles.items():
            self._counts[other] += self._counts.pop(item.ref)
        self._calls.release([item.ref for item in doubles])
        return final

    @locked
    def share(self, refs: Iterable[BlockRef]) -> None:
        """Counts one more sequence for each of `refs` (a fork). Does not call the ledger."""
        refs = list(refs)
        self._expect(refs)
        self._counts.update(refs)

    def release(self, refs: Sequence[BlockRef]) -> None:
        """Gives up the block table of one sequence. `refs` lists the head of the chain first."""
        self.release_many([refs])

    @locked
    def release_many(self, tables: Iterable[Sequence[BlockRef]]) -> None:
        """Releases several sequences' block tables. Blocks that other sequences of this worker use remain held. Each
        table lists the head of its chain first.
        """
        self._calls.check_fence()
        self._calls.release(self._uncount(tables)[0])

    @locked
    def hand_over(self, tables: Tables, attempt: Attempt | None = None) -> TicketId:
        """Gives up these block tables, whose blocks must all be sealed, and returns a ticket for them. This worker
        still holds the blocks that its other sequences use. After Stale, NotHolder or LedgerUnavailable, this worker
        still holds all blocks. After LedgerUnavailable, try again with the same tables and the same `attempt`, or call
        `forget`. If `attempt` is None, a hand-over that fails is forgotten at once.
        """
        flat = [table for branch in tables for table in branch]
        refs = list(self._times(flat))
        with self._once(attempt) as attempt:
            ticket = self._calls.call(lambda: self.holder.hand_over(refs, attempt))
        self._calls.release(self._uncount(flat)[0])
        return ticket

    @locked
    def deliver(self, items: Sequence[SealItem], digests: Sequence[int], attempt: Attempt) -> list[BlockRef]:
        """Seals blocks that one sequence uses, and moves them to the ticket of `attempt`. Accepts at most CHUNK items.
        Returns, for each item, the reference that the ticket holds. After an error, call `forget`, and release the
        blocks that are still counted. If the header contradicts one of the returned references, requests a rebuild and
        raises Stale; the blocks are then no longer counted.
        """
        refs = [item.ref for item in items]
        self._expect(refs)
        self.arena.mark_sealed(refs, [item.prefix_hash for item in items], digests)
        final = self._calls.call(lambda: self.holder.deliver(items, attempt))
        self._uncount([refs])
        doubles = [
            (other, item.prefix_hash or b"") for item, other in zip(items, final, strict=True) if item.ref != other
        ]
        if doubles and not self.arena.has(*zip(*doubles, strict=True)):
            self._calls.contradicted("an indexed block was reallocated")
            raise Stale("an indexed block was reallocated")
        return final

    @locked
    def claim(self, ticket: Ticket, attempt: Attempt | None = None) -> Tables:
        """Takes over the ticket's block tables, and returns them.

        Raises Gone if the ticket has been claimed or has ended, Stale if it names blocks that it does not hold, and
        ValueError if it is for another arena. After LedgerUnavailable, claim the ticket again with the same `attempt`,
        or call `decline`. If `attempt` is None, a claim that fails is forgotten at once.
        """
        if ticket.arena_id != self.arena.arena_id:
            raise ValueError(f"the ticket is for arena {ticket.arena_id}, but this arena is {self.arena.arena_id}")
        with self._once(attempt) as attempt:
            claimed = self._claim(ticket.id, attempt)
        named = [ref for branch in ticket.tables for table in branch for ref in table]
        if not set(named) <= set(claimed):
            self._calls.release([ref for ref in claimed if ref not in self._counts])
            raise Stale("the ticket names blocks that it does not hold")
        self._counts.update(named)
        self._calls.release([ref for ref in claimed if ref not in self._counts])
        return ticket.tables

    @locked
    def decline(self, ticket: Ticket, attempt: Attempt | None = None) -> None:
        """Releases a ticket's blocks now instead of at the end of its lease, if the ledger answers. Blocks that this
        worker's sequences use are kept. `attempt` is the attempt of an unfinished claim of the ticket, or None if no
        claim has begun.
        """
        self._calls.check_fence()
        self.holder.give_up(ticket.id)
        if attempt is not None:
            self.forget(attempt)

    @locked
    def forget(self, attempt: Attempt) -> None:
        """Drops an unfinished hand-over, delivery or claim that will not be repeated. Ends the ticket of a hand-over or
        delivery, and releases the blocks that a claim has obtained.
        """
        if attempt in self._wanted:
            self._wanted.discard(attempt)
            self._calls.is_unsure = True  # the call may have taken effect without an answer
        self.holder.forget(attempt)
        self._calls.release([ref for ref in attempt.refs if ref not in self._counts])

    @contextmanager
    def _once(self, attempt: Attempt | None) -> Iterator[Attempt]:
        """Yields `attempt`, or a new attempt if it is None. A new attempt is forgotten if the body of the `with`
        statement raises a LedgerError.
        """
        made = attempt or Attempt()
        try:
            yield made
        except LedgerError:
            if attempt is None:
                self.forget(made)
            raise

    def _claim(self, ticket: TicketId, attempt: Attempt) -> list[BlockRef]:
        self._wanted.add(attempt)
        try:
            claimed = self._calls.call(lambda: self.holder.claim(ticket, attempt))
        except LedgerUnavailable:
            raise
        except LedgerError:  # this worker has some blocks if the ticket's lease ended between two calls
            self.forget(attempt)
            raise
        self._wanted.discard(attempt)
        return claimed

    def assert_idle(self) -> None:
        """Checks that the worker holds only its reserve, both in this record and in the ledger. Raises AssertionError
        otherwise.
        """
        assert not self._counts, f"{len(self._counts)} blocks are still counted: {dict(self._counts)}"
        self.rejoining.reconcile()
        ledger_side = set(self._calls.call(self.holder.holdings))
        assert ledger_side == set(self._reserve), f"the ledger also has {ledger_side - set(self._reserve)}"

    def close(self) -> None:
        """Gives up all blocks, ends the holder, and closes the writer slot. Call it only when no step is running."""
        self.holder.close()  # joins the beat thread, which may be waiting for the lock
        self._counts.clear()
        self._reserve.clear()
        self.writer_slot.close()

    def _uncount(self, tables: Iterable[Sequence[BlockRef]]) -> tuple[list[BlockRef], list[BlockRef]]:
        """Subtracts one sequence per table. Returns the blocks that no sequence uses any more, and the blocks that
        other sequences still use. Both lists are in order of first appearance. In this order, a shared head comes
        before every tail, so that tails are evicted before heads.
        """
        times = self._times(tables)
        gone: list[BlockRef] = []
        kept: list[BlockRef] = []
        for ref, n in times.items():
            self._counts[ref] -= n
            (kept if self._counts[ref] else gone).append(ref)
        for ref in gone:
            del self._counts[ref]
        return gone, kept

    def _times(self, tables: Iterable[Sequence[BlockRef]]) -> Counter[BlockRef]:
        """Returns the number of tables that contain each block. Raises NotHolder if more tables contain a block than
        sequences hold it.
        """
        times: Counter[BlockRef] = Counter()
        for table in tables:
            times.update(table)
        if missing := [ref for ref, n in times.items() if self._counts.get(ref, 0) < n]:
            raise NotHolder(f"block {missing[0].block} is given up more often than it is held")
        return times

    def _expect(self, refs: Iterable[BlockRef]) -> None:
        self._calls.check_fence()
        for ref in refs:
            if ref not in self._counts:
                raise NotHolder(f"block {ref.block} (generation {ref.generation}) is not held here")
