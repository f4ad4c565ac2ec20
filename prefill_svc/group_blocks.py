"""Manages the blocks of sequence groups in prefill: allocates, shares, seals, hands over and releases them."""

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
    """Logs the sequences that have come back to prefill with outputs. `again` contains, for each sequence, the number
    of tokens that are computed again.
    """
    logger.info(
        "%d sequences came back: %d tokens computed again, at most %d of one", len(again), sum(again), max(again)
    )


class GroupBlocks:
    """The owner of the blocks that a prefill worker holds for its jobs."""

    def __init__(self, attached: Attached, layout: KvLayout) -> None:
        self._attached = attached
        self._layout = layout
        self._rules = layout.rules()
        self._groups = self._rules.groups
        self._slides = layout.slides
        self._block_size = layout.block_size
        self._came_back = Burst(_tell_back)
        self.is_short = False
        """Whether the arena had too few blocks for a chunk of this step."""

    # --- admission

    def admit(self, job: Job) -> bool:
        """Acquires the cached prefixes, and allocates the remaining blocks of KV groups without a window, for all
        sequences or for none. Returns whether the job got these blocks. `grow` later allocates the blocks of KV groups
        with a window, because a sequence may release them before it needs more.
        """
        held, groups = self._attached.held, self._groups
        cached = self._cached_prefixes(job)
        heads = [prefix.num_blocks or job.shared_blocks(i, self._block_size) for i, prefix in enumerate(cached)]
        missing = [
            blocks_of(s.num_tokens, self._block_size) - head for s, head in zip(job.sequences, heads, strict=True)
        ]
        try:
            fresh = iter(held.alloc(sum(missing) * sum(not group.slides for group in groups)))
        except (Exhausted, LedgerUnavailable):
            held.release_many(table for prefix in cached for table in prefix.tables)
            return False
        for sequence, prefix, head, count in zip(job.sequences, cached, heads, missing, strict=True):
            own = [[next(fresh) for _ in range(0 if group.slides else count)] for group in groups]
            self._begin(sequence, prefix if prefix.num_blocks else self._share(job.trunk, head), own)
        return True

    def grow(self, chunk: Chunk) -> bool:
        """Allocates the blocks that a chunk needs and that `admit` did not allocate, all or none. Returns whether the
        chunk has all its blocks and need not wait for the trunk to compute shared blocks (`_follow`).
        """
        if self._awaits_trunk(chunk.sequence):
            return False
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

    def _cached_prefixes(self, job: Job) -> list[CachedPrefix]:
        """Acquires and returns the cached prefix of each sequence, which is empty if the sequence takes its first
        blocks from the trunk. In KV groups with a window, only the end of a cached prefix is acquired. If a sequence
        diverges from the trunk before this end and has no separate cached prefix, all sequences start from a shorter
        prefix, and the trunk computes the shared blocks.
        """
        trunk = self._cached_prefix(job, 0, 0)
        cached = [trunk, *(self._cached_prefix(job, i, trunk.num_blocks) for i in range(1, len(job.sequences)))]
        shared = [job.shared_blocks(i, self._block_size) for i in range(len(cached))]
        pairs = zip(shared, cached, strict=True)
        if self._slides and any(0 < n < trunk.num_blocks and not prefix.num_blocks for n, prefix in pairs):
            self._attached.held.release_many(table for prefix in cached for table in prefix.tables)
            trunk = find_prefix(self._attached.held, job.trunk.hashes[1 : min(filter(None, shared)) + 1], self._layout)
            cached = [trunk, *(CachedPrefix.nothing(self._layout) for _ in cached[1:])]
        return cached

    def _share(self, trunk: Sequence, num_blocks: int) -> CachedPrefix:
        """Returns the first `num_blocks` blocks of the trunk, with a new reference to each, for another sequence.
        Blocks that the trunk has not computed yet follow later (`_follow`).
        """
        if not num_blocks:
            return CachedPrefix.nothing(self._layout)
        tables = [
            [] if len(table) < num_blocks else table[self._rules.first_needed(group, num_blocks) : num_blocks]
            for group, table in enumerate(trunk.tables)
        ]
        self._attached.held.share(ref for table in tables for ref in table)
        return CachedPrefix(num_blocks, tables)

    def _awaits_trunk(self, sequence: Sequence) -> bool:
        return any(len(table) * self._block_size < sequence.num_computed for table in sequence.tables)

    def _cached_prefix(self, job: Job, index: int, trunk_blocks: int) -> CachedPrefix:
        """Acquires and returns the cached prefix of a sequence, without the block of the last position, which must be
        computed. `trunk_blocks` is the length of the trunk's cached prefix. The result is empty if the sequence shares
        more blocks than that with the trunk, if no block can be reused, or if the blocks that the sequence shares with
        the trunk are not found.
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
        pairs = [[*cached, *own] for cached, own in zip(head.tables, fresh, strict=True)]
        sequence.set_tables(
            BlockTable(refs, head.num_blocks - len(cached) if refs else 0)
            for refs, cached in zip(pairs, head.tables, strict=True)
        )
        sequence.num_sealed = head.num_blocks
        sequence.num_computed = sequence.num_cached = head.num_blocks * self._block_size
        if sequence.output_ids:
            again = sequence.num_tokens - sequence.num_computed
            self._came_back.note(again)

    # --- after a step

    def seal(self, plan: Plan) -> None:
        """Seals the blocks that this step filled, and the partial last block of each complete sequence. Then releases
        the blocks that have left a window, after the job's other sequences have taken the blocks that they share.
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
        if not self._slides:
            return
        for job in dict.fromkeys(job for job, _ in plan):
            self._follow(job)
        dropped = [chunk.sequence.drop_unneeded(self._layout) for _, chunk in plan]
        if any(dropped):
            self._attached.held.release_many(dropped)

    def _follow(self, job: Job) -> None:
        """In KV groups with a window, gives the trunk's blocks to the sequences that share them, after the trunk has
        computed the blocks and before it drops them.
        """
        for sequence in job.sequences:
            if self._awaits_trunk(sequence) and job.trunk.num_computed >= sequence.num_computed:
                head = sequence.num_computed // self._block_size
                firsts = [self._rules.first_needed(group, head) for group in range(len(self._groups))]
                tables = zip(sequence.tables, job.trunk.tables, firsts, strict=True)
                taken = [[] if len(own) else trunk[first:head] for own, trunk, first in tables]
                self._attached.held.share(ref for refs in taken for ref in refs)
                sequence.set_tables(
                    BlockTable(refs, first) if refs else own
                    for own, refs, first in zip(sequence.tables, taken, firsts, strict=True)
                )

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
        """Returns a ticket for the tables of the job's sequences. Raises the errors of `HeldBlocks.hand_over`. After an
        error, the caller must call `hand_over` again, or `forget`.
        """
        sequences = job.sequences
        tables = tuple(tuple(tuple(table.live) for table in sequence.tables) for sequence in sequences)
        ticket_id = self._attached.held.hand_over(tables, job.hand_over)
        num_tokens = tuple(sequence.num_computed for sequence in sequences)
        return Ticket(self._attached.arena.arena_id, ticket_id, tables, num_tokens)

    def forget(self, job: Job) -> None:
        """Releases a job's blocks, and ends its ticket if there is one."""
        self.end_ticket(job)
        self.release(job.sequences)

    def end_ticket(self, job: Job) -> None:
        """Ends a job's ticket, which no worker will claim. Does nothing if there is none."""
        with suppress(Fenced):
            self._attached.held.forget(job.hand_over)

    def release(self, sequences: Seq[Sequence]) -> None:
        """Releases all blocks of these sequences. A sequence may have no blocks."""
        tables = [sequence.live_refs() for sequence in sequences]
        for sequence in sequences:
            sequence.forget_blocks()
        with suppress(Fenced):  # a fenced holder has no blocks
            self._attached.held.release_many(tables)


def _replace(job: Job, group: int, block: int, old: BlockRef, new: BlockRef) -> None:
    """Replaces `old` with `new` in all tables of the job, because `HeldBlocks.seal` has moved the references."""
    for sequence in job.sequences:
        table = sequence.tables[group]
        if block < len(table) and table[block] == old:
            table[block] = new
