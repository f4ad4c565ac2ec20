"""The blocks that a worker keeps allocated in advance, so that a decode step rarely needs to call the ledger."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice

from block_store.arena.writer_slots import WriterSlot
from block_store.errors import ArenaLost, Exhausted, HeaderAheadError, LedgerUnavailable
from block_store.holder.outage import OutageCalls, locked
from block_store.ledger.scripts import CHUNK
from common.types import BlockRef


class Reserve:
    """A queue of RESERVED blocks that no sequence uses yet. The beat thread calls `level` to keep the queue near its
    target.
    """

    def __init__(self, calls: OutageCalls, writer_slot: WriterSlot, least: int) -> None:
        """Creates an empty reserve. `least` is the minimum value of `target`."""
        self.target = least
        """Number of blocks to which the beat thread fills the reserve."""
        self._calls = calls
        self._writer_slot = writer_slot
        self._least = least
        self._refs: dict[BlockRef, None] = {}

    @property
    def lock(self) -> threading.RLock:  # type: ignore[valid-type]
        return self._calls.lock

    def __len__(self) -> int:
        return len(self._refs)

    def __iter__(self) -> Iterator[BlockRef]:
        return iter(self._refs)

    def __contains__(self, ref: object) -> bool:
        return ref in self._refs

    def take(self, num_blocks: int, spare: int = 0) -> list[BlockRef]:
        """Returns `num_blocks` blocks from the reserve, which is refilled first if it has too few. Raises Exhausted if
        too few blocks are available, or if a refill would leave fewer than `spare` available. Raises LedgerUnavailable
        if the reserve is too small and the ledger cannot be used, and ArenaLost if the arena is lost. After an error,
        the reserve still has its blocks.
        """
        if num_blocks > len(self._refs):
            self._refill(num_blocks, spare)
        self._calls.check_fence()
        refs = list(islice(self._refs, num_blocks))
        for ref in refs:
            del self._refs[ref]
        return refs

    def expect(self, num_blocks: int) -> None:
        """Sets the target; see `HeldBlocks.expect`."""
        self.target = max(self._least, min(num_blocks, self._calls.arena.num_blocks // 8))

    def level(self) -> None:
        """Allocates available blocks up to the target, or releases a large surplus."""
        try:
            while (missing := self.target - len(self._refs)) > 0:
                with self.lock:
                    self._fetch(min(missing, CHUNK))
                self._calls.holder.lease.keep()
        except (Exhausted, LedgerUnavailable):
            return
        if (surplus := len(self._refs) - 2 * self.target - CHUNK) > 0:
            self.give_back(surplus)

    @locked
    def give_back(self, num_blocks: int) -> None:
        """Releases the `num_blocks` most recently allocated blocks of the reserve, so that any worker can allocate
        them.
        """
        refs = list(self._refs)[len(self._refs) - num_blocks :]
        for ref in refs:
            del self._refs[ref]
        self._calls.release(refs)

    def keep_only(self, is_kept: Callable[[BlockRef], bool]) -> None:
        """Removes the blocks for which `is_kept` returns False, without releasing them. `Rejoining.reconcile` releases
        those that the ledger records.
        """
        self._refs = {ref: None for ref in self._refs if is_kept(ref)}

    def clear(self) -> None:
        """Removes all blocks without releasing them, because the holder has ended."""
        self._refs.clear()

    def _refill(self, num_blocks: int, spare: int) -> None:
        """Allocates the blocks that are missing for `num_blocks` and, if there is room, `_least` more. Allocates at
        most CHUNK blocks unless more are missing; the next beat allocates the rest.
        """
        self._calls.check_fence()
        missing = num_blocks - len(self._refs)
        wanted = missing + self._least
        if wanted <= 0:
            return
        try:
            self._fetch(min(wanted, max(missing, CHUNK)), spare)
        except Exhausted:
            if missing <= 0 or missing == wanted:
                raise
            self._fetch(missing, spare)

    def _fetch(self, num_blocks: int, spare: int = 0) -> None:
        """Allocates blocks and records them in the header at once, so that a rebuild sees their owner."""
        calls, arena, holder = self._calls, self._calls.arena, self._calls.holder
        refs = calls.call(lambda: holder.alloc(num_blocks, spare))
        holder.lease.num_available -= num_blocks
        if arena.rebuild_count != calls.rebuild_count:
            raise LedgerUnavailable("the ledger is being rebuilt")
        if any(ref.generation >> 32 != calls.rebuild_count for ref in refs):
            calls.contradicted(reason := "a generation that this ledger cannot issue")
            raise LedgerUnavailable(reason)
        try:
            arena.raise_generations(refs, self._writer_slot.number)
        except HeaderAheadError as error:
            if arena.is_lost:
                raise ArenaLost(f"arena {arena.arena_id} is lost") from error
            calls.contradicted(str(error))
            raise LedgerUnavailable(str(error)) from error
        # A rebuild that began since then may not have seen this worker in the header (`rebuild`). In that case, the
        # blocks do not belong to this worker.
        if arena.rebuild_count != calls.rebuild_count:
            raise LedgerUnavailable("the ledger is being rebuilt")
        self._refs.update(dict.fromkeys(refs))
