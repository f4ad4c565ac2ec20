"""The ticket that a prefill worker hands over to a decode worker, through the gateway.

In the ledger, `hand_over.lua` or `deliver.lua` creates a ticket, and `claim.lua` gives the ticket's blocks to the
caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.types import BlockRef, Epoch


@dataclass(frozen=True, slots=True)
class TicketId:
    """The id of a ticket in the ledger, with a secret by which the claimer proves that it has received the ticket."""

    epoch: Epoch
    """The ticket's holder epoch."""
    secret: bytes = field(repr=False)
    """A random secret, because epochs can be guessed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The record of a hand-over from prefill to decode: a holder with a lease, and the blocks that it holds.
    `tables[branch][group]` is a block table, in which every block is sealed.
    """

    arena_id: str
    id: TicketId
    """The ticket's id in the ledger of `arena_id`."""
    tables: tuple[tuple[tuple[BlockRef, ...], ...], ...]
    num_tokens: tuple[int, ...]
    """For each branch, the number of token positions whose KV is in its tables (the prompt and all outputs except the
    newest token).
    """
