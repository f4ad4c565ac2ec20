"""Tickets on their way in: whether one fits its group, and claiming it as soon as the ledger answers.

A ticket's lease is short, so it is claimed before its group waits for a turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from block_store.attach import Attached
from block_store.errors import Fenced, LedgerError, LedgerUnavailable
from common.types import Ticket
from decode_svc.scheduler import Group
from engine.sequence import BlockTable

logger = logging.getLogger("decode")


@dataclass(slots=True)
class Claim:
    """What a submitted group brought along."""

    ticket: Ticket
    chain_start: bytes
    """The parent of its first block's hash."""


def fits_ticket(group: Group, ticket: Ticket, block_size: int) -> bool:
    """Whether the ticket's tables fit the sequences. A worker never trusts that its caller has checked."""
    return len(ticket.tables) == len(ticket.num_tokens) == len(group.sequences) > 0 and all(
        [len(table) for table in tables] == [-(-num_tokens // block_size)] and sequence.num_tokens == num_tokens + 1
        for tables, num_tokens, sequence in zip(ticket.tables, ticket.num_tokens, group.sequences, strict=True)
    )


def take_over(group: Group, claim: Claim, block_size: int) -> None:
    """Give the group's sequences the blocks that were claimed."""
    ticket = claim.ticket
    for sequence, groups, num_tokens in zip(group.sequences, ticket.tables, ticket.num_tokens, strict=True):
        sequence.table = BlockTable(groups[0])
        sequence.num_computed = num_tokens
        sequence.num_sealed = num_tokens // block_size
        sequence.tail_sealed = num_tokens % block_size != 0
        sequence.hashes = [claim.chain_start]
    group.live = list(group.sequences)
    group.claimed_ns = time.monotonic_ns()


class Claims:
    """Groups that wait for the ledger to answer, in order of arrival."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached
        self._waiting: dict[Group, Claim] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._waiting)

    def add(self, group: Group, claim: Claim) -> None:
        self._waiting[group] = claim

    def settle(self) -> Iterator[tuple[Group, Claim | None]]:
        """Claim what is to be claimed while the ledger answers; each group with its claim, without if that is over.

        Errors: Fenced.
        """
        for group, claim in list(self._waiting.items()):
            done: Claim | None = claim
            try:
                self._attached.held.claim(claim.ticket)
            except LedgerUnavailable:
                return
            except Fenced:
                raise
            except LedgerError as error:
                logger.info("ticket %d cannot be claimed: %s", claim.ticket.epoch, error)
                done = None
            del self._waiting[group]
            yield group, done

    def drop(self, group: Group) -> None:
        """Let its ticket go, if it still waits."""
        if (claim := self._waiting.pop(group, None)) is not None:
            self.decline(claim.ticket)

    def decline(self, ticket: Ticket) -> None:
        """Let a ticket go that was not taken in."""
        if ticket.arena_id == self._attached.arena.arena_id:
            with suppress(Fenced):
                self._attached.held.decline(ticket)
