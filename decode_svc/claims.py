"""Checks that incoming tickets fit their groups, and claims the tickets. A ticket's lease is short, so the ticket is
claimed before its group is queued.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from block_store.errors import Fenced, LedgerError, LedgerUnavailable
from block_store.holder.attach import Attached
from block_store.ledger.lane import Attempt
from block_store.ledger.prefix_hash import next_hash
from common.group_need import GroupNeed, blocks_of
from common.ticket import Ticket
from common.types import KvLayout
from decode_svc.scheduler import Group
from engine.beam_search import Candidates
from engine.block_table import BlockTable

logger = logging.getLogger("decode")


@dataclass(slots=True)
class Claim:
    """The state of a submitted group until its ticket is claimed."""

    ticket: Ticket
    chain_start: bytes
    """The parent hash of the first block."""
    candidates: Candidates | None = None
    """The candidates for the first step of a beam search, or None for samples."""
    attempt: Attempt = field(default_factory=Attempt)
    cancelled: set[int] = field(default_factory=set)
    """Samples that were cancelled before the ticket was claimed."""


def fits_ticket(group: Group, ticket: Ticket, layout: KvLayout) -> bool:
    """Returns whether the ticket's tables fit the group's sequences. The newest token of a sample has no KV yet. A beam
    search begins with the prompt; its first tokens come from the candidates.
    """
    newest = 0 if group.search is not None else 1
    return len(ticket.tables) == len(ticket.num_tokens) == len(group.sequences) > 0 and all(
        [len(table) for table in tables]
        == [spec.retention.num_needed(num_tokens, layout.block_size) for spec in layout.groups]
        and sequence.num_tokens == num_tokens + newest
        and len(sequence.output_ids) >= newest
        for tables, num_tokens, sequence in zip(ticket.tables, ticket.num_tokens, group.sequences, strict=True)
    )


def most_needed(group: Group, max_model_len: int) -> GroupNeed:
    """Returns the largest sizes that the group may reach. The worker rejects the group if the worker's floor is too
    small for these sizes.
    """
    first = group.sequences[0]
    width = len(group.sequences) if group.search is None else first.sampling.width
    prompt_len = len(first.prompt_ids)
    return GroupNeed(prompt_len, min(first.stopping.max_tokens, max_model_len - prompt_len), width)


def adopt(group: Group, claim: Claim, block_size: int) -> None:
    """Sets the block tables, hashes and progress of the group's sequences from a claim."""
    ticket, first = claim.ticket, group.sequences[0]
    first.hashes = [claim.chain_start]
    if first.sampling.width > 1:
        first.extend_hashes(len(first.prompt_ids) // block_size, block_size, next_hash)
    for sequence, groups, num_tokens in zip(group.sequences, ticket.tables, ticket.num_tokens, strict=True):
        num_blocks = blocks_of(num_tokens, block_size)
        sequence.set_tables(BlockTable(refs, num_blocks - len(refs)) for refs in groups)
        sequence.num_computed = num_tokens
        sequence.num_sealed = num_tokens // block_size
        sequence.tail_sealed = num_tokens % block_size != 0
        sequence.hashes = first.hashes.copy()
    group.live = list(group.sequences)
    group.claimed_ns = time.monotonic_ns()


class Claims:
    """A queue of groups whose tickets have not been claimed yet, in order of arrival."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._waiting: dict[Group, Claim] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._waiting)

    def add(self, group: Group, claim: Claim) -> None:
        self._waiting[group] = claim

    def cancel(self, group: Group, sample_index: int) -> bool:
        """Marks a sample, which is then dropped when its group's ticket is claimed. Returns False if the group is not
        waiting any more.
        """
        if (claim := self._waiting.get(group)) is None:
            return False
        claim.cancelled.add(sample_index)
        return True

    def settle(self) -> Iterator[tuple[Group, Claim | None]]:
        """Claims tickets while the ledger answers. Yields each group with its claim, or with None if the
        ticket cannot be claimed.

        Raises Fenced if the worker's lease has ended.
        """
        for group, claim in list(self._waiting.items()):
            done: Claim | None = claim
            try:
                self._attached.held.claim(claim.ticket, claim.attempt)
            except LedgerUnavailable:
                return
            except Fenced:
                raise
            except LedgerError as error:
                logger.info("ticket %d cannot be claimed: %s", claim.ticket.id.epoch, error)
                done = None
            del self._waiting[group]
            yield group, done

    def drop(self, group: Group) -> None:
        """Gives up the group's ticket if the group is still waiting."""
        if (claim := self._waiting.pop(group, None)) is not None:
            self.decline(claim.ticket, claim.attempt)

    def decline(self, ticket: Ticket, attempt: Attempt | None = None) -> None:
        """Gives up a ticket of this worker's arena, and releases the blocks that an unfinished claim of the ticket has
        obtained. Does nothing if the ticket belongs to another arena.
        """
        if ticket.arena_id == self._attached.arena.arena_id:
            with suppress(Fenced):
                self._attached.held.decline(ticket, attempt)
