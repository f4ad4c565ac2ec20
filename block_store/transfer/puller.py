"""The receiving side of a transfer: copies the blocks of another host's ticket into this arena.

The puller is a holder of its own, with a lease and a writer slot, as a prefill worker is. A pull looks up which of the
ticket's blocks are already cached here, allocates blocks for the others, copies them, seals them under the same prefix
hashes, and hands everything over to a local ticket, which a decode worker claims. Until the source's ticket has been
read, its lease is extended.

    ask for hashes -> take (found + allocated, all or none) -> copy -> seal -> hand over
                                                               (keep the source's ticket)

If anything fails, the blocks are released, but only once the transport is quiescent (`transport`); until then they stay
allocated to the puller, so that nobody else is given them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from block_store.errors import BlockStoreError, Exhausted, Fenced, LedgerUnavailable
from block_store.holder.attach import Attached
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.codec import SealItem
from block_store.ledger.scripts import chunks
from block_store.transfer.source_client import SourceClient
from block_store.transfer.transport import Copy, Transport
from common.errors import Aborted, LooseleafError, Unavailable
from common.ticket import Ticket
from common.types import BlockRef, CacheQuota

logger = logging.getLogger("pull")
T = TypeVar("T")
KEEP_S = 2.0
"""Interval at which the lease of the source's ticket is extended."""
ROOM_POLL_S = 0.02
UPKEEP_S = 0.25
MAX_PULLS = 16
"""Number of pulls that copy at the same time. It bounds the memory of the frames that are under way."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of a pull."""

    ticket: Ticket
    """A ticket of this arena."""
    num_pulled: int
    """Number of blocks that were copied."""
    num_found: int
    """Number of blocks that were already here."""
    num_bytes: int
    num_tokens: int
    """Number of token positions that were copied, for all KV groups or for some."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """Blocks of this arena for all blocks of a ticket. Each is counted once in `HeldBlocks`."""

    found: dict[BlockRef, BlockRef]
    """For each of the source's blocks that is cached here, the local block."""
    fresh: dict[BlockRef, BlockRef]
    """For each of the others, the block that receives its bytes."""


class Puller:
    """Pulls blocks into one arena. `run` must run beside it. Calls of the ledger are made in one thread."""

    def __init__(self, attached: Attached, sources: SourceClient, transport: Transport) -> None:
        self._attached = attached
        self._sources = sources
        self._transport = transport
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._room = asyncio.Lock()
        """Held while a pull waits for room, so that pulls are served in the order of their arrival."""
        self._copying = asyncio.Semaphore(MAX_PULLS)
        self._num_pulls = 0
        self._withheld: list[Copy] = []
        """Failed copies to which the transport may still write."""

    @property
    def num_withheld(self) -> int:
        """Number of blocks to which a transport may still write after its copy has failed."""
        return sum(len(copy.into) for copy in self._withheld)

    async def pull(self, ticket: Ticket, source: str, quota: CacheQuota | None = None) -> Pulled:
        """Returns a local ticket for copies of a ticket's blocks. Cancelling this ends the pull.

        Waits for room as long as it takes. Raises Aborted if the source no longer has the blocks or the bytes are
        wrong, and Unavailable if the source or the ledger does not answer.
        """
        if self._attached.is_fenced:
            raise Unavailable("the holder of pulled blocks is registering again", retry_after_s=1.0)
        self._num_pulls += 1
        try:
            return await self._pull(ticket, source, quota)
        except Fenced as error:
            raise Unavailable("the holder of pulled blocks was fenced", retry_after_s=1.0) from error
        except LedgerUnavailable as error:
            raise Unavailable("the ledger in Redis does not answer", retry_after_s=1.0) from error
        except BlockStoreError as error:
            logger.warning("pull from %s: %s", source, error)
            raise Aborted("the pulled blocks were reallocated") from error
        finally:
            self._num_pulls -= 1

    async def run(self) -> None:
        """Releases withheld blocks once nothing writes to them, and registers again after a fence. Until cancelled."""
        while True:
            await asyncio.sleep(UPKEEP_S)
            await self._sources.refresh()
            for copy in [copy for copy in self._withheld if self._transport.is_quiescent(copy)]:
                self._withheld.remove(copy)
                self._thread.submit(_release_each, self._attached.held, copy.into)
            if self._attached.is_fenced and not self._num_pulls and not self._withheld:
                await self._renew()

    async def close(self) -> None:
        """Ends the holder. Call it after all pulls have ended."""
        self._thread.shutdown(wait=True)
        await asyncio.to_thread(self._attached.close)
        await self._sources.close()

    async def _pull(self, ticket: Ticket, source: str, quota: CacheQuota | None) -> Pulled:
        held = self._attached.held
        names = list(dict.fromkeys(ref for branch in ticket.tables for table in branch for ref in table))
        async with self._kept(ticket, source), self._copying:
            hashes = dict(zip(names, await self._sources.prefix_hashes(source, ticket, names), strict=True))
            taken = await self._take(held, hashes)
            copy = Copy(source, ticket, list(taken.fresh), list(taken.fresh.values()), self._attached.arena)
            try:
                await self._transport.fetch(copy)
            except BaseException:
                self._undo(held, copy, taken)
                raise
        items = [SealItem(local, hashes[ref] or None, quota) for ref, local in taken.fresh.items()]
        return await self._whole(
            lambda: _finish(held, ticket, taken, items), lambda pulled: held.decline(pulled.ticket)
        )

    async def _take(self, held: HeldBlocks, hashes: dict[BlockRef, bytes]) -> _Taken:
        """Waits until there are blocks for the whole ticket. Holds none while it waits."""
        async with self._room:
            while True:
                taken = await self._whole(lambda: _take(held, hashes), lambda late: _release(held, late))
                if taken is not None:
                    return taken
                await asyncio.sleep(ROOM_POLL_S)

    def _undo(self, held: HeldBlocks, copy: Copy, taken: _Taken) -> None:
        """Releases the blocks of a copy that has failed, if nothing can write to them any more."""
        if self._transport.is_quiescent(copy):
            self._thread.submit(_release, held, taken)
        else:
            self._thread.submit(_release, held, _Taken(taken.found, {}))
            self._withheld.append(copy)

    async def _renew(self) -> None:
        try:
            await self._in_thread(self._attached.renew)
        except BlockStoreError as error:
            logger.warning("the holder of pulled blocks cannot register: %s", error)

    @asynccontextmanager
    async def _kept(self, ticket: Ticket, source: str) -> AsyncIterator[None]:
        """Extends the lease of the source's ticket until the block ends. A failure to do so shows when it is read."""

        async def keep() -> None:
            while True:
                await asyncio.sleep(KEEP_S)
                with suppress(LooseleafError):
                    await self._sources.keep(source, ticket)

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()

    async def _whole(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Runs `work` in the ledger's thread. If this is cancelled meanwhile, its result is undone there."""
        running = asyncio.ensure_future(self._in_thread(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(lambda done: done.exception() or self._thread.submit(undo, done.result()))
            raise

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _take(held: HeldBlocks, hashes: dict[BlockRef, bytes]) -> _Taken | None:
    """Takes references to the blocks that are cached here, and allocates the others. Takes nothing, and returns None,
    if there is no room.
    """
    full = [ref for ref, one in hashes.items() if one]
    present = held.present([hashes[ref] for ref in full])
    found: dict[BlockRef, BlockRef] = {}
    for run in _runs(full, present):
        [refs] = held.acquire([[hashes[ref] for ref in run]])
        found.update(zip(run, refs, strict=False))
    missing = [ref for ref in hashes if ref not in found]
    try:
        fresh = held.alloc(len(missing))
    except Exhausted:
        held.release(list(found.values()))
        return None
    except BlockStoreError:
        held.release(list(found.values()))
        raise
    return _Taken(found, dict(zip(missing, fresh, strict=True)))


def _runs(refs: Sequence[BlockRef], present: Sequence[bool]) -> Iterator[list[BlockRef]]:
    """Yields the runs of consecutive blocks that are present."""
    for is_present, run in groupby(zip(refs, present, strict=True), lambda pair: pair[1]):
        if is_present:
            yield [ref for ref, _ in run]


def _finish(held: HeldBlocks, ticket: Ticket, taken: _Taken, items: Sequence[SealItem]) -> Pulled:
    """Seals the copies and hands all blocks over to a new ticket. If that fails, releases all of them."""
    local, unsealed = dict(taken.found), dict(taken.fresh)
    counted: Counter[BlockRef] = Counter()
    try:
        for part in chunks(items):
            for ref, final in zip(list(unsealed)[: len(part)], held.seal(part), strict=True):
                local[ref] = final
                del unsealed[ref]
        counted.update(local.values())
        tables = tuple(tuple(tuple(local[ref] for ref in table) for table in branch) for branch in ticket.tables)
        times = Counter(ref for branch in tables for table in branch for ref in table)
        for ref in (times - counted).elements():  # a block that several tables name is counted once for each
            held.share([ref])
            counted[ref] += 1
        ticket_id = held.hand_over(tables)
    except BaseException:
        left = counted.elements() if counted else local.values()
        _release_each(held, [*left, *unsealed.values()])
        raise
    copies = Ticket(held.arena.arena_id, ticket_id, tables, ticket.num_tokens)
    num_tokens = copied_tokens(ticket, taken.fresh.keys(), held.arena.layout.block_size)
    return Pulled(copies, len(items), len(taken.found), len(items) * held.arena.block_bytes, num_tokens)


def copied_tokens(ticket: Ticket, copied: Collection[BlockRef], block_size: int) -> int:
    """Returns the number of token positions of a ticket whose blocks, for at least one KV group, are among `copied`.
    Positions in blocks that branches share count once.
    """
    seen: set[BlockRef] = set()
    total = 0
    for tables, num_tokens in zip(ticket.tables, ticket.num_tokens, strict=True):
        num_blocks, copied_here = -(-num_tokens // block_size), set[int]()
        for table in tables:  # its last block is that of the last position
            numbered = enumerate(table, num_blocks - len(table))
            copied_here.update(number for number, ref in numbered if ref in copied and ref not in seen)
        total += sum(min(block_size, num_tokens - number * block_size) for number in copied_here)
        seen.update(ref for table in tables for ref in table)
    return total


def _release(held: HeldBlocks, taken: _Taken | None) -> None:
    if taken is not None:
        _release_each(held, [*taken.found.values(), *taken.fresh.values()])


def _release_each(held: HeldBlocks, refs: Sequence[BlockRef]) -> None:
    with suppress(Fenced):  # the end of the holder has released everything
        held.release_many([[ref] for ref in refs])
