"""The receiving side of a transfer: copies the blocks of another host's ticket into this arena.

The puller is a holder with a lease and a writer slot, like a prefill worker. A pull looks up which of the ticket's
blocks this arena already contains, allocates blocks for the others, copies them, seals them under the same prefix
hashes, and delivers all of them to a local ticket, which a decode worker claims. Until the source's ticket has been
read, its lease is extended.

    ask for hashes -> take (found + allocated, all or none) -> copy, and deliver what has arrived to a local ticket
                                                               (keep the source's ticket)

While a prompt is still being computed, early pulls copy its first blocks in the same way. The puller itself keeps the
local ticket of an early pull, until the caller lets go of the blocks. The pull of the whole prompt finds these blocks,
and waits for those that are arriving (`arrivals`).

If anything fails, the blocks are released, but those into which the transport may still write stay allocated to the
puller until the transport is quiescent (`transport`), so that no other holder gets them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import TypeVar

from block_store.errors import BlockStoreError, Fenced, LedgerUnavailable
from block_store.holder.attach import Attached
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.codec import SealItem
from block_store.transfer.arrivals import Arrivals
from block_store.transfer.early_tickets import EarlyTickets
from block_store.transfer.pulled_blocks import Delivery, Pulled, Taken, leading_blocks, release, take
from block_store.transfer.source_client import SourceClient
from block_store.transfer.source_lease import SourceLease, kept
from block_store.transfer.transport import Copy, Transport
from common.errors import Aborted, ResourceExhausted, Unavailable
from common.ticket import Ticket
from common.types import BlockRef, CacheQuota

logger = logging.getLogger("pull")
T = TypeVar("T")
ROOM_POLL_S = 0.02
MAX_ROOM_POLL_S = 0.25
UPKEEP_S = 0.25
CLOSE_S = 3.0
"""Maximum number of seconds to wait at the end for running pulls and for writes into blocks."""
MAX_PULLS = 16
"""Maximum number of pulls that copy at the same time, which bounds the memory of received frames."""
NO_ROOM = "there is no room for blocks of a prompt that is still being computed"
MAX_EARLY_PULLS = 8
"""Maximum number of early pulls among them, so that pulls for which a decode worker waits find a place."""


class Puller:
    """The receiver of other hosts' blocks for one arena. `run` must run as a separate task. All pulls use the ledger in
    the same thread.
    """

    def __init__(self, attached: Attached, sources: SourceClient, transport: Transport) -> None:
        self._attached = attached
        self._sources = sources
        self._transport = transport
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pull")
        self._room = asyncio.Lock()
        """Held while a pull waits for room, so that pulls are served in the order of their arrival."""
        self._is_short = False
        """Whether a pull is waiting for room."""
        self._copying = asyncio.Semaphore(MAX_PULLS)
        self._copying_early = asyncio.Semaphore(MAX_EARLY_PULLS)
        self._arrivals = Arrivals()
        self._early = EarlyTickets()
        self._num_pulls = 0
        self._withheld: list[tuple[Copy, Delivery]] = []
        """Failed copies to whose destination the transport may still write."""

    @property
    def num_withheld(self) -> int:
        """Number of blocks of failed copies to whose destination the transport may still write."""
        return sum(len(copy.into) for copy, _ in self._withheld)

    async def pull(
        self, ticket: Ticket, source: str, quota: CacheQuota | None = None, public_tokens: int = 0
    ) -> Pulled:
        """Returns a local ticket for copies of a ticket's blocks. Cancelling the call ends the pull. `quota` is the
        tenant's quota; the blocks of the first `public_tokens` tokens do not count against it.

        Waits for room for as long as the source keeps its ticket. Raises Aborted if the source no longer has the
        blocks, if the bytes are wrong, or if a local block was reallocated. Raises Unavailable if the source or the
        ledger does not answer, or if the holder of pulled blocks is fenced.
        """
        pulled = await self._counted(ticket, source, quota, public_tokens)
        assert pulled is not None
        return pulled

    @asynccontextmanager
    async def early(
        self, ticket: Ticket, source: str, quota: CacheQuota | None = None, public_tokens: int = 0
    ) -> AsyncIterator[int]:
        """Copies the blocks of a ticket for a prompt that is still being computed, and yields the number of copied
        token positions. Holds all of the ticket's blocks until the end of the `with` statement, but if none had to be
        copied, holds none.

        Does not wait for room, and leaves enough room for the largest group, so that early pulls cannot prevent other
        pulls. If there is less room, or if a pull is waiting for room, raises ResourceExhausted. Also raises the errors
        of `pull`.
        """
        pulled = await self._counted(ticket, source, quota, public_tokens, early=True)
        if pulled is None:
            yield 0
            return
        try:
            yield pulled.num_tokens - pulled.num_early_tokens
        finally:
            self._early.remove(pulled.ticket.id)
            with suppress(RuntimeError):  # the puller is closed
                self._thread.submit(self._attached.held.holder.give_up, pulled.ticket.id)

    async def _counted(
        self, ticket: Ticket, source: str, quota: CacheQuota | None, public_tokens: int, *, early: bool = False
    ) -> Pulled | None:
        """Pulls, and translates the errors of the ledger. Returns None if an early pull has nothing to copy."""
        if self._attached.is_fenced:
            raise Unavailable("the holder of pulled blocks is registering again", retry_after_s=1.0)
        public = leading_blocks(ticket, public_tokens, self._attached.arena.layout.block_size)
        self._num_pulls += 1
        try:
            return await self._pull(ticket, source, lambda ref: None if ref in public else quota, early=early)
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
        """Releases withheld blocks once the transport no longer writes to them, and registers again after a fence. Runs
        until cancelled.
        """
        while True:
            await asyncio.sleep(UPKEEP_S)
            try:
                await self._upkeep()
            except Exception:
                logger.exception("the upkeep of pulls failed")

    async def _upkeep(self) -> None:
        await self._sources.refresh()
        for copy, delivery in [pair for pair in self._withheld if self._transport.is_quiescent(pair[0])]:
            self._withheld.remove((copy, delivery))
            self._thread.submit(delivery.release_fresh)
        if self._early.are_due:
            await self._in_thread(lambda: self._early.keep(self._attached.held.holder.ledger))
        if self._attached.is_fenced and not self._num_pulls and not self._withheld:
            await self._renew()

    async def close(self) -> None:
        """Ends the holder. If a pull is still running after CLOSE_S seconds, or the transport may still write to the
        holder's blocks, the holder ends only with the process: its lease expires, and the blocks stay in quarantine
        until the lock of the holder's writer slot is free.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_S
        while self._num_pulls or not all(self._transport.is_quiescent(copy) for copy, _ in self._withheld):
            if loop.time() > deadline:
                return
            await asyncio.sleep(0.01)
        self._attached.withdraw()  # ends the retries of a registration
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._attached.close)
        await self._transport.close()
        await self._sources.close()

    async def _pull(
        self, ticket: Ticket, source: str, quota_of: Callable[[BlockRef], CacheQuota | None], *, early: bool
    ) -> Pulled | None:
        held = self._attached.held
        names = list(dict.fromkeys(ref for branch in ticket.tables for table in branch for ref in table))
        async with kept(self._sources, source, ticket) as lease:
            hashes = dict(zip(names, await self._sources.prefix_hashes(source, ticket, names), strict=True))
            async with self._copying_early if early else nullcontext(), self._copying:
                taken = await self._take(source, held, hashes, lease, early=early)
                fresh = frozenset(filter(None, (hashes[ref] for ref in taken.fresh)))
                if early and not fresh:
                    self._thread.submit(release, held, taken)
                    return None
                items = [SealItem(local, hashes[ref] or None, quota_of(ref)) for ref, local in taken.fresh.items()]
                copied = self._early.copied().intersection(hashes[ref] for ref in taken.found)
                if not early:
                    self._early.count(copied)
                delivery = Delivery(held, ticket, taken, items, [ref for ref in taken.found if hashes[ref] in copied])
                with self._arrivals.arriving(source, fresh):
                    await self._copy(source, ticket, taken, delivery)
                    pulled = await self._whole(delivery.finish, lambda pulled: held.decline(pulled.ticket))
                    if early:
                        self._early.add(pulled.ticket.id, fresh)
                    return pulled

    async def _take(
        self, source: str, held: HeldBlocks, hashes: dict[BlockRef, bytes], lease: SourceLease, *, early: bool
    ) -> Taken[BlockRef]:
        """Waits for blocks that are arriving, and then for its turn to take blocks. Declare the fresh ones as arriving
        before anything else can run.
        """
        while True:
            await self._arrivals.wait(source, hashes.values())
            if early and self._is_short:
                raise ResourceExhausted(NO_ROOM)
            async with self._room:
                if not self._arrivals.include(hashes.values()):
                    return await self._take_in_turn(held, hashes, lease, early=early)

    async def _take_in_turn(
        self, held: HeldBlocks, hashes: dict[BlockRef, bytes], lease: SourceLease, *, early: bool
    ) -> Taken[BlockRef]:
        """Waits until there is room for the blocks of the whole ticket, and takes them. Holds no blocks while it waits.
        Raises the error that ended the source's lease. An early pull does not wait, and raises ResourceExhausted.
        """
        pause_s, spare = ROOM_POLL_S, self._attached.floor_blocks if early else 0
        try:
            while lease.lost is None:
                taken = await self._whole(lambda: take(held, hashes, spare), lambda late: release(held, late))
                if taken is not None:
                    return taken
                if early:
                    raise ResourceExhausted(NO_ROOM)
                self._is_short = True
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_ROOM_POLL_S)
            raise lease.lost
        finally:
            self._is_short = False

    async def _copy(self, source: str, ticket: Ticket, taken: Taken[BlockRef], delivery: Delivery) -> None:
        """Copies the blocks. The ledger's thread delivers the blocks that have arrived. If the copy fails, its blocks
        are released (`_undo`).
        """
        copy = Copy(
            source, ticket, list(taken.fresh), list(taken.fresh.values()), self._attached.arena,
            lambda digests: self._thread.submit(delivery.store, digests),
        )  # fmt: skip
        try:
            await self._transport.fetch(copy)
        except BaseException:
            self._undo(copy, delivery)
            raise

    def _undo(self, copy: Copy, delivery: Delivery) -> None:
        """Releases the blocks of a copy that has failed. Blocks that have not been delivered are released once nothing
        can write to them any more.
        """
        self._thread.submit(delivery.abandon)
        if self._transport.is_quiescent(copy):
            self._thread.submit(delivery.release_fresh)
        else:
            self._withheld.append((copy, delivery))

    async def _renew(self) -> None:
        try:
            await self._in_thread(self._attached.renew)
        except BlockStoreError as error:
            logger.warning("the holder of pulled blocks cannot register: %s", error)

    async def _whole(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """Runs `work` in the ledger's thread, and returns its result. If the caller is cancelled meanwhile, runs `undo`
        with the result in the same thread.
        """
        running = asyncio.ensure_future(self._in_thread(work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(lambda done: done.exception() or self._thread.submit(undo, done.result()))
            raise

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
