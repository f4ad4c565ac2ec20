"""The ledger looks up each block of a ticket once, and still tells when the ticket has ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from block_store.errors import Gone, NotHolder, Stale
from block_store.ledger.scripts import LedgerScripts
from block_store.transfer import known_tickets
from block_store.transfer.block_source import BlockSource
from block_store.transfer.known_tickets import KnownTickets
from common.ticket import TicketId
from common.types import BlockRef
from testing.ledger.store import TestStore, chain


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks of each call of the ledger's `keep`."""
    found: list[int] = []
    keep = LedgerScripts.keep

    def counted(scripts: LedgerScripts, ticket: TicketId, refs: Sequence[BlockRef] = ()) -> None:
        found.append(len(refs))
        keep(scripts, ticket, refs)

    monkeypatch.setattr(LedgerScripts, "keep", counted)
    return found


def test_a_block_is_looked_up_once_and_the_lease_is_extended_each_time(store: TestStore, lookups: list[int]) -> None:
    source, caller = BlockSource(store.arena, store.ledger, KnownTickets()), store.caller()
    refs = store.fill(caller, chain("a", 6))
    ticket = store.ledger.hand_over(caller.lane(), refs)
    assert source.keep(ticket, refs[:4]) == chain("a", 4)
    assert source.keep(ticket, []) == []
    assert len(list(source.frames(ticket, refs[:4]))) == 1
    assert len(source.sealed_digests(ticket, refs[1:3])) == 2
    assert lookups == [4, 0, 0, 0]
    assert source.keep(ticket, refs) == chain("a", 6)
    assert lookups[-1] == 6


def test_a_known_ticket_gets_no_other_block_and_nothing_after_its_end(store: TestStore) -> None:
    source, caller = BlockSource(store.arena, store.ledger, KnownTickets()), store.caller()
    refs, other = store.fill(caller, chain("a", 4)), store.fill(caller, chain("other", 1))
    ticket = store.ledger.hand_over(caller.lane(), refs)
    source.keep(ticket, refs)
    for wrong in (other, [BlockRef(refs[0].block, refs[0].generation + 1)]):
        with pytest.raises(NotHolder):
            next(source.parts(ticket, [*refs, *wrong]))
    with pytest.raises(Gone):
        next(source.parts(TicketId(ticket.epoch, bytes(16)), refs))
    store.ledger.give_up(ticket)
    for ask in (source.keep, source.sealed_digests, lambda *args: next(source.frames(*args))):
        with pytest.raises(Gone):
            ask(ticket, refs)


def test_a_known_block_that_was_reallocated_is_not_sent(store: TestStore) -> None:
    source, caller = BlockSource(store.arena, store.ledger, KnownTickets()), store.caller()
    refs = store.fill(caller, chain("a", 2))
    ticket = store.ledger.hand_over(caller.lane(), refs)
    source.keep(ticket, refs)
    store.arena.raise_generations([BlockRef(refs[1].block, refs[1].generation + 1)], caller.slot.number)
    with pytest.raises(Stale):
        source.keep(ticket, refs)
    with pytest.raises(Stale):
        list(source.frames(ticket, refs))


def test_the_oldest_tickets_are_forgotten_and_looked_up_again(
    store: TestStore, lookups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_tickets, "MAX_BLOCKS", 5)
    source, caller = BlockSource(store.arena, store.ledger, KnownTickets()), store.caller()
    tables = [store.fill(caller, chain(name, 3)) for name in "abc"]
    tickets = [store.ledger.hand_over(caller.lane(), refs) for refs in tables]
    for ticket, refs in zip(tickets, tables, strict=True):
        source.keep(ticket, refs)
    source.keep(tickets[2], tables[2])
    source.keep(tickets[0], tables[0])
    assert lookups == [3, 3, 3, 0, 3]
