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
    """The tickets that the puller keeps, each with the prefix hashes of the blocks that its early pull copied."""

    def __init__(self) -> None:
        self._tickets: dict[TicketId, frozenset[bytes]] = {}
        self._kept_at = 0.0

    def add(self, ticket: TicketId, copied: frozenset[bytes]) -> None:
        self._tickets[ticket] = copied

    def remove(self, ticket: TicketId) -> None:
        del self._tickets[ticket]

    def copied(self) -> frozenset[bytes]:
        """Returns the hashes of all blocks that early pulls have copied and still hold."""
        return frozenset[bytes]().union(*self._tickets.values())

    @property
    def are_due(self) -> bool:
        """Whether `keep` must be called."""
        return bool(self._tickets) and time.monotonic() > self._kept_at + KEEP_S

    def keep(self, ledger: LedgerScripts) -> None:
        """Extends all leases. If a ticket has ended, the pull of the whole prompt copies those of its blocks that have
        been evicted.
        """
        self._kept_at = time.monotonic()
        for ticket in list(self._tickets):
            try:
                ledger.keep(ticket)
            except Gone:
                logger.warning("the blocks of an early pull are not held any more")
            except LedgerError as error:
                logger.warning("the tickets of early pulls are not kept: %s", error)
                return
