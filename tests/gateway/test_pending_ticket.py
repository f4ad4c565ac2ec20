"""What a ticket counts."""

from __future__ import annotations

from common.convert import ticket_to_pb
from common.ticket import Ticket, TicketId
from common.types import BlockRef, Epoch
from gateway.fleet.pending_ticket import tokens_of


def test_positions_in_blocks_that_branches_share_count_once() -> None:
    """The second and the third branch have a block in common that the first does not have."""
    tables = [[1, 2, 3], [1, 4, 5], [1, 4, 6]]
    refs = tuple((tuple(BlockRef(block, 7) for block in table),) for table in tables)
    ticket = Ticket("a", TicketId(Epoch(1), b"s"), refs, (40, 41, 42))
    assert tokens_of(ticket_to_pb(ticket), 16) == 40 + (41 - 16) + (42 - 32)
    one = Ticket("a", TicketId(Epoch(1), b"s"), (refs[0],) * 2, (40, 40))
    assert tokens_of(ticket_to_pb(one), 16) == 40
