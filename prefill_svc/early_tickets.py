"""Hands out tickets for full blocks of a prompt before its prefill ends, so that another host can copy these blocks
while later ones are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from block_store.errors import LedgerUnavailable, NotHolder, Stale
from block_store.holder.attach import Attached
from common.ticket import Ticket
from prefill_svc.events import ChunkDone, Emit
from prefill_svc.job import Job

MOST_TICKETS = 16
"""Approximate maximum number of early tickets of a prompt, because each takes calls to two ledgers."""


@dataclass(slots=True)
class EarlyTickets:
    """The progress of a job's early tickets."""

    next_token: int
    """The first position whose block no early ticket has held."""
    min_tokens: int
    """Minimum number of positions in an early ticket."""

    @classmethod
    def of(cls, first_token: int, min_tokens: int, num_tokens: int) -> EarlyTickets:
        """Returns the tickets for a sequence of `num_tokens` tokens, beginning with the block of `first_token`."""
        return cls(first_token, max(min_tokens, (num_tokens - first_token) // MOST_TICKETS, 1))


def hand_out(attached: Attached, jobs: Iterable[Job], emits: Mapping[Job, Emit]) -> None:
    """Emits an early ticket for every job that has asked for them and has enough new sealed blocks."""
    for job in jobs:
        if job.early is not None and (ticket := _next_ticket(attached, job, job.early)) is not None:
            emits[job](ChunkDone(min(job.trunk.num_computed, len(job.trunk.prompt_ids)), ticket))


def _next_ticket(attached: Attached, job: Job, early: EarlyTickets) -> Ticket | None:
    """Returns a ticket for the trunk's sealed blocks that no early ticket has held, or None if there are too few. The
    job keeps its own references. If there can be no ticket, counts a fallback.
    """
    held, trunk, layout = attached.held, job.trunk, attached.arena.layout
    if layout.slides:
        held.fallbacks.note("no early ticket", "the model has windows or recurrent states")
        job.early = None
        return None
    num_tokens = trunk.num_sealed * layout.block_size
    if num_tokens - early.next_token < early.min_tokens:
        return None
    first = early.next_token // layout.block_size
    tables = tuple(tuple(table[first : trunk.num_sealed]) for table in trunk.tables)
    held.share(ref for table in tables for ref in table)
    try:
        ticket = held.hand_over([tables])
    except (LedgerUnavailable, NotHolder, Stale) as error:
        held.release_many(tables)
        held.fallbacks.note("no early ticket", str(error))
        return None
    early.next_token = num_tokens
    return Ticket(attached.arena.arena_id, ticket, (tables,), (num_tokens,))
