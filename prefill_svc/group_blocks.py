"""The blocks of prefill's sequence groups: obtained together or not at all, sealed as they fill, handed to a ticket.

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
from common.types import BlockRef
from engine.block_table import BlockTable
from engine.sequence import Chunk, Sequence
from prefill_svc.job import Job

logger = logging.getLogger("prefill")
Plan = list[tuple[Job, Chunk]]


def _tell_back(again: list[int]) -> None:
    """Logs the sequences that came back from decode. `again` contains the number of tokens of each that are computed a
    second time.
    """
    logger.info(
        "%d sequences came back: %d tokens computed again, at most %d of one", len(again), sum(again), max(again)
    )


class GroupBlocks:
    """The blocks that a prefill worker holds for its jobs."""

    def __init__(self, attached: Attached, block_size: int) -> None:
        self._attached = attached
        self._block_size = block_size
        self._came_back = Burst(_tell_back)

    # --- admission

    def admit(self, job: Job) -> bool:
        """Acquires the cached prefixes and allocates the rest, for all sequences or for none."""
        held = self._attached.held
        cached: list[list[BlockRef]] = []
        for index in range(len(job.sequences)):
            cached.append(self._cached_prefix(job, index, len(cached[0]) if cached else 0))
        heads = [len(refs) or job.shared_blocks(i, self._block_size) for i, refs in enumerate(cached)]
        missing = [
            blocks_of(s.num_tokens, self._block_size) - head for s, head in zip(job.sequences, heads, strict=True)
        ]
        try:
            fresh = iter(held.alloc(sum(missing)))
        except (Exhausted, LedgerUnavailable):
            held.release_many(cached)
            return False
        for index, refs in enumerate(cached):
            if len(refs) < heads[index]:
                refs = job.trunk.table[: heads[index]]
                held.share(refs)
            self._begin(job.sequences[index], refs, [next(fresh) for _ in range(missing[index])])
        return True

    def _cached_prefix(self, job: Job, index: int, trunk_blocks: int) -> list[BlockRef]:
        """Returns the blocks that are cached under a sequence's prefix hashes, without the last position, which is
        always computed.

        Returns nothing if that would be less than the sequence shares with the trunk, of which `trunk_blocks` blocks
        were found, or if the log-probabilities of the prompt are requested.
        """
        sequence, shared = job.sequences[index], job.shared_blocks(index, self._block_size)
        if not sequence.hashes:
            sequence.hashes = job.trunk.hashes[: shared + 1]
        reusable = (sequence.num_tokens - 1) // self._block_size
        if trunk_blocks < shared or not reusable or sequence.sampling.prompt_logprobs is not None:
            return []
        sequence.extend_hashes(reusable, self._block_size, next_hash)
        [found] = self._attached.held.acquire([sequence.hashes[1 : reusable + 1]])
        if len(found) < shared:  # the ledger does not answer any more
            self._attached.held.release(found)
            return []
        return found

    def _begin(self, sequence: Sequence, head: list[BlockRef], fresh: list[BlockRef]) -> None:
        sequence.table = BlockTable([*head, *fresh])
        sequence.num_sealed = len(head)
        sequence.num_computed = sequence.num_cached = len(head) * self._block_size
        if sequence.output_ids:
            again = sequence.num_tokens - sequence.num_computed
            self._came_back.note(again)

    # --- after a step

    def seal(self, plan: Plan) -> None:
        """Seals every block that this step filled, and the partial last block of complete sequences."""
        items: list[SealItem] = []
        places: list[tuple[Job, int]] = []
        for job, chunk in plan:
            sequence = chunk.sequence
            full = sequence.num_full_blocks(self._block_size)
            sequence.extend_hashes(full, self._block_size, next_hash)
            for block in range(sequence.num_sealed, full):
                items.append(SealItem(sequence.table[block], sequence.block_hash(block), sequence.quota_of(block)))
                places.append((job, block))
            sequence.num_sealed = full
            if sequence.num_computed == sequence.num_tokens and full < len(sequence.table):
                items.append(SealItem(sequence.table[full], None))
                places.append((job, full))
        if items:
            for (job, block), item, ref in zip(places, items, self._attached.held.seal(items), strict=True):
                if ref != item.ref:  # another block has the hash already
                    _replace(job, block, item.ref, ref)

    def fork(self, job: Job) -> list[Sequence]:
        """Returns one sequence per branch, in the request's order. Branches that continue the same sequence share its
        blocks.
        """
        branches: list[Sequence] = []
        continued: set[int] = set()
        for index, sample_index in job.branches:
            sequence = job.sequences[index]
            if index in continued:
                self._attached.held.share(sequence.table)
                sequence = sequence.fork(sample_index)
            continued.add(index)
            branches.append(sequence)
        return branches

    def hand_over(self, job: Job) -> Ticket:
        """Returns a ticket with a table per sequence. Raises the same errors as `HeldBlocks.hand_over`. After an error,
        the caller must call it again or call `forget`.
        """
        sequences = job.sequences
        ticket_id = self._attached.held.hand_over([[sequence.table] for sequence in sequences], job.hand_over)
        tables = tuple((tuple(sequence.table),) for sequence in sequences)
        num_tokens = tuple(sequence.num_computed for sequence in sequences)
        return Ticket(self._attached.arena.arena_id, ticket_id, tables, num_tokens)

    def forget(self, job: Job) -> None:
        """Releases a job's blocks, and ends a ticket that was begun for it."""
        self.end_ticket(job)
        self.release(job.sequences)

    def end_ticket(self, job: Job) -> None:
        """Ends the ticket of a job, because no worker will claim it."""
        with suppress(Fenced):
            self._attached.held.forget(job.hand_over)

    def release(self, sequences: Seq[Sequence]) -> None:
        """Releases all blocks of these sequences. Some of them may hold none."""
        tables = [list(sequence.table) for sequence in sequences]
        for sequence in sequences:
            sequence.table = BlockTable()
        with suppress(Fenced):  # they were taken back already
            self._attached.held.release_many(tables)


def _replace(job: Job, block: int, old: BlockRef, new: BlockRef) -> None:
    """Replaces a block in all tables that share it, because `HeldBlocks.seal` has moved the count of all of them."""
    for sequence in job.sequences:
        if block < len(sequence.table) and sequence.table[block] == old:
            sequence.table[block] = new
