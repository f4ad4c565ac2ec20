"""The blocks of prefill's sequence groups. They are obtained all or none, sealed as they fill, and handed to a ticket.

Does not depend on models, queues or callers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from contextlib import suppress

from block_store.errors import Exhausted, Fenced, LedgerUnavailable
from block_store.holder.attach import Attached
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import next_hash
from common.group_need import blocks_of
from common.telemetry import Burst
from common.ticket import Ticket
from common.types import BlockRef, KvLayout
from engine.block_table import BlockTable
from engine.sequence import Chunk, Sequence
from prefill_svc.job import Job
from worker.cached_prefix import CachedPrefix, find_prefix
from worker.sealing import seal_items

logger = logging.getLogger("prefill")
Plan = list[tuple[Job, Chunk]]


def _tell_back(again: list[int]) -> None:
    """Logs the sequences that came back from decode. `again` contains, for each sequence, the number of tokens that are
    recomputed.
    """
    logger.info(
        "%d sequences came back: %d tokens computed again, at most %d of one", len(again), sum(again), max(again)
    )


class GroupBlocks:
    """The blocks that a prefill worker holds for its jobs."""

    def __init__(self, attached: Attached, layout: KvLayout) -> None:
        self._attached = attached
        self._layout = layout
        self._block_size = layout.block_size
        self._came_back = Burst(_tell_back)
        self.is_short = False
        """Whether the arena has had no block for a chunk of this step."""

    # --- admission

    def admit(self, job: Job) -> bool:
        """Acquires the cached prefixes and allocates the remaining blocks, for all sequences or for none.

        For a single sequence, `grow` allocates the blocks of groups that slide, because the sequence will release most
        of them before it needs more. Several sequences share blocks, and get all of them now.
        """
        held = self._attached.held
        at_once = [len(job.sequences) > 1 or not group.slides for group in self._layout.groups]
        cached: list[CachedPrefix] = []
        for index in range(len(job.sequences)):
            cached.append(self._cached_prefix(job, index, cached[0].num_blocks if cached else 0))
        heads = [prefix.num_blocks or self._shared(job, i, cached[0]) for i, prefix in enumerate(cached)]
        missing = [
            blocks_of(s.num_tokens, self._block_size) - head for s, head in zip(job.sequences, heads, strict=True)
        ]
        try:
            fresh = iter(held.alloc(sum(missing) * sum(at_once)))
        except (Exhausted, LedgerUnavailable):
            held.release_many(table for prefix in cached for table in prefix.tables)
            return False
        for index, prefix in enumerate(cached):
            if prefix.num_blocks < heads[index]:
                prefix = self._trunk_prefix(job.trunk, heads[index])
                held.share(ref for table in prefix.tables for ref in table)
            own = [[next(fresh) for _ in range(missing[index] if now else 0)] for now in at_once]
            self._begin(job.sequences[index], prefix, own)
        return True

    def grow(self, chunk: Chunk) -> bool:
        """Allocates the blocks that a chunk needs and that `admit` did not allocate, all or none. Returns whether the
        chunk has all its blocks."""
        num_blocks = blocks_of(chunk.end, self._block_size)
        missing = [max(0, num_blocks - len(table)) for table in chunk.sequence.tables]
        if not any(missing):
            return True
        try:
            fresh = iter(self._attached.held.alloc(sum(missing)))
        except LedgerUnavailable:
            return False
        except Exhausted:
            self.is_short = True
            return False
        for table, count in zip(chunk.sequence.tables, missing, strict=True):
            for _ in range(count):
                table.append(next(fresh))
        return True

    def _shared(self, job: Job, index: int, trunk: CachedPrefix) -> int:
        """Returns the number of leading blocks that a sequence takes from the trunk, whose own prefix was cached. With
        a window, only the end of a cached prefix is held, so a sequence that diverges earlier shares nothing.
        """
        shared = job.shared_blocks(index, self._block_size)
        if shared < trunk.num_blocks and any(group.slides for group in self._layout.groups):
            return 0
        return shared

    def _trunk_prefix(self, trunk: Sequence, num_blocks: int) -> CachedPrefix:
        """Returns the part of the trunk's first blocks that another sequence needs."""
        num_tokens = num_blocks * self._block_size
        firsts = [group.first_needed(num_tokens, self._block_size) for group in self._layout.groups]
        tables = [table[first:num_blocks] for table, first in zip(trunk.tables, firsts, strict=True)]
        return CachedPrefix(num_blocks, tables)

    def _cached_prefix(self, job: Job, index: int, trunk_blocks: int) -> CachedPrefix:
        """Returns the blocks that are cached under a sequence's prefix hashes. The last position is always computed, so
        its block is not looked for.

        Returns nothing if the sequence shares more blocks with the trunk than would be found (`trunk_blocks` blocks of
        the trunk were cached), or if every position must be computed.
        """
        nothing = CachedPrefix.nothing(self._layout)
        sequence, shared = job.sequences[index], job.shared_blocks(index, self._block_size)
        if not sequence.hashes:
            sequence.hashes = job.trunk.hashes[: shared + 1]
        reusable = (sequence.num_tokens - 1) // self._block_size
        if trunk_blocks < shared or not reusable or sequence.wants_every_row:
            return nothing
        sequence.extend_hashes(reusable, self._block_size, next_hash)
        found = find_prefix(self._attached.held, sequence.hashes[1 : reusable + 1], self._layout)
        if found.num_blocks < shared:  # the ledger has stopped answering, or blocks of a window have been evicted
            self._attached.held.release_many(found.tables)
            return nothing
        return found

    def _begin(self, sequence: Sequence, head: CachedPrefix, fresh: list[list[BlockRef]]) -> None:
        pairs = zip(head.tables, fresh, strict=True)
        sequence.set_tables(BlockTable([*cached, *own], head.num_blocks - len(cached)) for cached, own in pairs)
        sequence.num_sealed = head.num_blocks
        sequence.num_computed = sequence.num_cached = head.num_blocks * self._block_size
        if sequence.output_ids:
            again = sequence.num_tokens - sequence.num_computed
            self._came_back.note(again)

    # --- after a step

    def seal(self, plan: Plan) -> None:
        """Seals every block that this step filled, and the partial last block of each complete sequence. Releases
        blocks that have slid out of a window.
        """
        items: list[SealItem] = []
        places: list[tuple[Job, int, int]] = []
        for job, chunk in plan:
            sequence = chunk.sequence
            full = sequence.num_full_blocks(self._block_size)
            sequence.extend_hashes(full, self._block_size, next_hash)
            for block in range(sequence.num_sealed, full):
                items += seal_items(sequence, block)
                places += [(job, group, block) for group in range(len(sequence.tables))]
            sequence.num_sealed = full
            if sequence.num_computed == sequence.num_tokens and full < len(sequence.table):
                items += [SealItem(table[full], None) for table in sequence.tables]
                places += [(job, group, full) for group in range(len(sequence.tables))]
        if items:
            for (job, group, block), item, ref in zip(places, items, self._attached.held.seal(items), strict=True):
                if ref != item.ref:  # a different block already has the hash
                    _replace(job, group, block, item.ref, ref)
        dropped = [chunk.sequence.drop_unneeded(self._layout) for _, chunk in plan]
        if any(dropped):
            self._attached.held.release_many(dropped)

    def fork(self, job: Job) -> list[Sequence]:
        """Returns one sequence per branch, in the request's order. Branches that continue the same sequence share its
        blocks.
        """
        branches: list[Sequence] = []
        continued: set[int] = set()
        for index, sample_index in job.branches:
            sequence = job.sequences[index]
            if index in continued:
                self._attached.held.share(sequence.live_refs())
                sequence = sequence.fork(sample_index)
            continued.add(index)
            branches.append(sequence)
        return branches

    def hand_over(self, job: Job) -> Ticket:
        """Returns a ticket with a table per sequence. Raises the same errors as `HeldBlocks.hand_over`. After an error,
        the caller must call this method again or call `forget`.
        """
        sequences = job.sequences
        tables = tuple(tuple(tuple(table.live) for table in sequence.tables) for sequence in sequences)
        ticket_id = self._attached.held.hand_over(tables, job.hand_over)
        num_tokens = tuple(sequence.num_computed for sequence in sequences)
        return Ticket(self._attached.arena.arena_id, ticket_id, tables, num_tokens)

    def forget(self, job: Job) -> None:
        """Releases a job's blocks, and ends the ticket that was begun for the job, if there is one."""
        self.end_ticket(job)
        self.release(job.sequences)

    def end_ticket(self, job: Job) -> None:
        """Ends the ticket of a job, because no worker will claim it."""
        with suppress(Fenced):
            self._attached.held.forget(job.hand_over)

    def release(self, sequences: Seq[Sequence]) -> None:
        """Releases all blocks of these sequences. Some of them may hold none."""
        tables = [sequence.live_refs() for sequence in sequences]
        for sequence in sequences:
            sequence.forget_blocks()
        with suppress(Fenced):  # the blocks have already been taken back
            self._attached.held.release_many(tables)


def _replace(job: Job, group: int, block: int, old: BlockRef, new: BlockRef) -> None:
    """Replaces a block in all tables that share it, because `HeldBlocks.seal` has moved their references to `new`."""
    for sequence in job.sequences:
        table = sequence.tables[group]
        if block < len(table) and table[block] == old:
            table[block] = new
