"""The ticket: what a prefill worker hands over to a decode worker, through the gateway.

`block_store/ledger/lua/hand_over.lua` makes one, `claim.lua` and `give_up.lua` end it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.types import BlockRef, Epoch


@dataclass(frozen=True, slots=True)
class TicketId:
    """Names a ticket to the ledger, and proves that it was issued to the caller."""

    epoch: Epoch
    """The ticket's holder epoch."""
    secret: bytes = field(repr=False)
    """Random: epochs can be guessed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The hand-over from prefill to decode: a holder with a lease, and what it holds.

    `tables[branch][group]` is a block table; every block in it is sealed.
    """

    arena_id: str
    id: TicketId
    """In the ledger of `arena_id`."""
    tables: tuple[tuple[tuple[BlockRef, ...], ...], ...]
    num_tokens: tuple[int, ...]
    """By branch the token positions whose KV lies in its tables (prompt and outputs but for the newest token)."""
