"""Extends the lease of a source's ticket while its blocks are pulled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from block_store.transfer.source_client import SourceClient
from common.errors import Aborted, LooseleafError
from common.ticket import Ticket

KEEP_S = 2.0
"""Interval in seconds at which leases are extended."""
MAX_UNANSWERED = 2
"""Number of consecutive unanswered extensions after which the source counts as lost."""


@dataclass(slots=True)
class SourceLease:
    """The state of the lease of the source's ticket."""

    lost: LooseleafError | None = None
    """The reason why the lease cannot be extended; None while it is extended."""


@asynccontextmanager
async def kept(sources: SourceClient, source: str, ticket: Ticket) -> AsyncIterator[SourceLease]:
    """Extends the lease of the source's ticket while the body of the `with` statement runs. Sets the yielded lease's
    `lost` if the source refuses, or if it fails to answer MAX_UNANSWERED times in a row.
    """
    lease = SourceLease()

    async def keep() -> None:
        num_unanswered = 0
        while lease.lost is None:
            await asyncio.sleep(KEEP_S)
            try:
                await sources.keep(source, ticket)
                num_unanswered = 0
            except LooseleafError as error:
                num_unanswered += 1
                if isinstance(error, Aborted) or num_unanswered >= MAX_UNANSWERED:
                    lease.lost = error

    keeping = asyncio.create_task(keep())
    try:
        yield lease
    finally:
        keeping.cancel()
