"""The blocks of a store's arena as a source for other hosts, and the statuses of errors about them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from block_store.arena.arena import Arena
from block_store.arena.header import Memory
from block_store.errors import BlockStoreError, Gone, LedgerUnavailable, NotHolder, Stale
from block_store.server.arena_owner import ArenaOwner
from block_store.transfer.block_source import BlockSource
from block_store.transfer.nixl_agent import NixlAgent
from common.errors import Aborted, FailedPrecondition, NotFound, PermissionDenied, Unavailable

_LOG = logging.getLogger(__name__)


def source_of(owner: ArenaOwner, arena_id: str) -> BlockSource:
    """Returns the blocks of `arena_id` for other hosts. Raises NotFound if this store does not serve that arena, and
    FailedPrecondition if its blocks are in a worker's device memory.
    """
    arena, ledger = owner.arena, owner.ledger
    if arena is None or ledger is None or arena_id != arena.arena_id:
        raise NotFound(f"arena_id {arena_id} is not served here")
    if arena.memory is Memory.WORKER_DEVICE:
        raise FailedPrecondition("the blocks are in device memory of the worker, which this host cannot share")
    return BlockSource(arena, ledger, owner.known_tickets)


async def mapped_by(agent: NixlAgent | None, arena: Arena) -> tuple[bytes, int]:
    """Returns the metadata of the store's NIXL agent, and the address of block 0 in its memory. Raises
    FailedPrecondition if there is no agent, if it is starting, or if the blocks are not in host memory.
    """
    if agent is None:
        raise FailedPrecondition("this block store has no NIXL agent; start it with --transport nixl")
    if arena.memory is not Memory.HOST:
        raise FailedPrecondition("blocks in the memory of a GPU are not read over NIXL")
    try:
        mapped = await agent.use(arena)
    except Unavailable as error:
        raise FailedPrecondition(str(error)) from error
    return mapped.agent, mapped.address


@contextmanager
def as_statuses() -> Iterator[None]:
    """Translates errors about a ticket's blocks into errors with a gRPC status."""
    try:
        yield
    except NotHolder as error:
        raise PermissionDenied(f"the ticket does not hold the requested blocks: {error}") from error
    except Gone as error:
        raise Aborted("the ticket no longer exists") from error
    except Stale as error:
        raise Aborted(str(error)) from error
    except LedgerUnavailable as error:
        raise Unavailable("the ledger in Redis does not answer", retry_after_s=1.0) from error
    except BlockStoreError as error:
        _LOG.warning("blocks cannot be sent: %s", error)
        raise Unavailable(f"the blocks cannot be sent: {error}", retry_after_s=1.0) from error
