"""The local tickets of early pulls, which hold the first blocks of prompts that are still being computed."""

from __future__ import annotations

import logging
import time

from block_store.errors import Gone, LedgerError
from block_store.ledger.scripts import LedgerScripts
from block_store.transfer.source_lease import KEEP_S
from common.ticket import TicketId

logger = logging.getLogger("pull")


class EarlyTickets:
    """The tickets that the puller keeps, each with the prefix hashes of the blocks that its early pull copied and
    that no request has counted.
    """

    def __init__(self) -> None:
        self._tickets: dict[TicketId, frozenset[bytes]] = {}
        self._ended: frozenset[TicketId] = frozenset()
        """Tickets whose lease had ended at the last call of `keep`."""
        self._kept_at = 0.0

    def add(self, ticket: TicketId, copied: frozenset[bytes]) -> None:
        self._tickets[ticket] = copied

    def remove(self, ticket: TicketId) -> None:
        del self._tickets[ticket]

    def copied(self) -> frozenset[bytes]:
        """Returns the hashes of the blocks that early pulls have copied, still hold, and no request has counted."""
        return frozenset[bytes]().union(*self._tickets.values())

    def count(self, hashes: frozenset[bytes]) -> None:
        """Notes that a request counts these blocks as copied for it, so that no other request does."""
        self._tickets = {ticket: copied - hashes for ticket, copied in self._tickets.items()}

    @property
    def are_due(self) -> bool:
        """Whether `keep` must be called."""
        return bool(self._tickets) and time.monotonic() > self._kept_at + KEEP_S

    def keep(self, ledger: LedgerScripts) -> None:
        """Extends all leases. If a ticket has ended, the pull of the whole prompt copies those of its blocks that have
        been evicted. Any thread may call this method.
        """
        self._kept_at = time.monotonic()
        tickets = list(self._tickets)
        ended = self._ended.intersection(tickets)
        for ticket in tickets:
            try:
                if ticket not in ended:
                    ledger.keep(ticket)
            except Gone:
                ended |= {ticket}
            except LedgerError as error:
                logger.warning("the tickets of early pulls are not kept: %s", error)
                break
        if lapsed := [ticket for ticket in ended - self._ended if ticket in self._tickets]:  # others were let go
            logger.warning("the blocks of %d early pulls are not held any more", len(lapsed))
        self._ended = ended
