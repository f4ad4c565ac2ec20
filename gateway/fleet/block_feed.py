"""Announces the cached blocks of tenants to subscribers, such as routers that speak vLLM's protocol.

Nothing is recorded for a tenant without subscribers. For the other tenants, the token ids of their requests go to a
`BlockCatalog`, and the ledgers are asked which blocks they have. The pause between two updates is the duration of the
last update divided by `BUSY_SHARE`, but at least `MIN_INTERVAL_S` and at most `MAX_INTERVAL_S`.

Memory is bounded, so a subscriber that falls too far behind gets the whole list again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from block_store.ledger.scripts import LedgerScripts
from common.errors import ResourceExhausted, Unavailable
from common.types import WorkerRecord
from gateway.fleet.block_catalog import MOST_BLOCKS, Arenas, BlockCatalog, Changes, TokenSequence
from gateway.intake.resolved_request import ResolvedRequest

logger = logging.getLogger("kv_events")
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 2.0
BUSY_SHARE = 0.05
MOST_SUBSCRIBERS = 32
MOST_OF_A_TENANT = 16
MOST_WAITING_TOKENS = 1 << 19
"""The largest number of tokens of a tenant's sequences that wait for the next update. If there are more, the oldest
sequences are dropped.
"""


class Subscription:
    """The changes that wait for one subscriber. The first changes contain all blocks."""

    def __init__(self) -> None:
        self.waiting: deque[Changes] = deque()
        """The changes, oldest first."""
        self.is_behind = True
        """Whether the subscriber needs all blocks next. If so, `waiting` is empty."""
        self._size = 0
        self._has_changed = asyncio.Event()
        self._is_over = False

    def put(self, changes: Changes) -> None:
        """Adds changes, unless the subscriber needs all blocks anyway. If the sizes of the waiting changes then exceed
        `MOST_BLOCKS` in total, drops all of them, and the subscriber needs all blocks.
        """
        if self.is_behind or changes == Changes():
            return
        self._add(changes)
        if self._size > MOST_BLOCKS:
            self.waiting.clear()
            self.is_behind, self._size = True, 0

    def put_everything(self, everything: Changes) -> None:
        self.is_behind = False
        self._add(everything)

    def end(self) -> None:
        self._is_over = True
        self._has_changed.set()

    async def next(self) -> Changes | None:
        """Waits for changes, and returns the oldest ones. Returns None if the feed has ended."""
        while not self.waiting and not self._is_over:
            self._has_changed.clear()
            await self._has_changed.wait()
        if self._is_over:
            return None
        changes = self.waiting.popleft()
        self._size -= changes.size
        return changes

    def _add(self, changes: Changes) -> None:
        self.waiting.append(changes)
        self._size += changes.size
        self._has_changed.set()


class _Tenant:
    """A tenant with subscribers."""

    def __init__(self, salt: bytes) -> None:
        self.salt = salt
        self.catalog = BlockCatalog(salt)
        self.subscriptions: set[Subscription] = set()
        self._waiting: deque[TokenSequence] = deque()
        self._num_tokens = 0

    def add(self, sequence: TokenSequence) -> None:
        self._waiting.append(sequence)
        self._num_tokens += len(sequence.token_ids)
        while self._num_tokens > MOST_WAITING_TOKENS:
            self._num_tokens -= len(self._waiting.popleft().token_ids)

    async def update(self, arenas: Arenas) -> None:
        """Brings the catalog up to date and informs the subscribers."""
        sequences, self._waiting, self._num_tokens = self._waiting, deque(), 0
        changes = await asyncio.to_thread(self.catalog.update, sequences, arenas)
        for subscription in self.subscriptions:
            subscription.put(changes)
        behind = [each for each in self.subscriptions if each.is_behind]
        for subscription in behind[:1]:  # the conversion of all blocks into messages takes tens of milliseconds
            subscription.put_everything(await asyncio.to_thread(self.catalog.everything))


class BlockFeed:
    """The subscriptions of all tenants. While there are subscribers, a task updates the catalogs of their tenants."""

    def __init__(self, arenas: Callable[[], Arenas], salt_of: Callable[[str], bytes]) -> None:
        """`salt_of(tenant)` returns the salt of a tenant's blocks if a request has no cache_salt."""
        self._arenas = arenas
        self._salt_of = salt_of
        self._tenants: dict[str, _Tenant] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def num_subscribers(self) -> int:
        return sum(len(tenant.subscriptions) for tenant in self._tenants.values())

    def computed(self, request: ResolvedRequest, outputs: Iterable[Sequence[int]]) -> None:
        """Notes that workers have computed a request's prompt and, after it, each of `outputs`. Ignores requests with a
        cache_salt or an adapter, because their blocks depend on more than the tenant and the token ids.
        """
        tenant = self._tenants.get(request.tenant)
        if tenant is None or request.adapter is not None or request.salt != tenant.salt:
            return
        for output in outputs:
            ids = [*request.prompt_ids, *output] if output else request.prompt_ids
            tenant.add(TokenSequence(ids, request.public_tokens))

    @contextmanager
    def subscribe(self, name: str) -> Iterator[Subscription]:
        """A context manager with a subscription to the blocks of the tenant `name`. Raises ResourceExhausted if there
        are too many subscribers, and Unavailable if the feed is closed.
        """
        if self._is_closed:
            raise Unavailable("the gateway is shutting down", retry_after_s=1.0)
        tenant = self._tenants.get(name) or _Tenant(self._salt_of(name))
        if len(tenant.subscriptions) >= MOST_OF_A_TENANT:
            raise ResourceExhausted(f"at most {MOST_OF_A_TENANT} subscribers per tenant", retry_after_s=1.0)
        if self.num_subscribers >= MOST_SUBSCRIBERS:
            raise ResourceExhausted(f"at most {MOST_SUBSCRIBERS} subscribers at once", retry_after_s=1.0)
        subscription = Subscription()
        self._tenants[name] = tenant
        tenant.subscriptions.add(subscription)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="kv events")
        try:
            yield subscription
        finally:
            tenant.subscriptions.discard(subscription)
            if not tenant.subscriptions:
                del self._tenants[name]

    def close(self) -> None:
        """Ends all subscriptions, and refuses new ones."""
        self._is_closed = True
        for tenant in self._tenants.values():
            for subscription in tenant.subscriptions:
                subscription.end()

    async def _run(self) -> None:
        while self._tenants:
            began = time.monotonic()
            for tenant in list(self._tenants.values()):
                try:
                    await tenant.update(self._arenas())
                except Exception:
                    logger.exception("the blocks of a tenant could not be updated")
            took_s = time.monotonic() - began
            await asyncio.sleep(min(max(MIN_INTERVAL_S, took_s / BUSY_SHARE), MAX_INTERVAL_S))


def prefill_arenas(records: Iterable[WorkerRecord], ledgers: Mapping[str, LedgerScripts]) -> Arenas:
    """Returns the arenas of the prefill workers among `records` that are not draining. `ledgers` are the known ledgers
    by arena id.
    """
    used = [record for record in records if record.role == "prefill" and not record.draining]
    ids = {record.arena_id for record in used}
    return Arenas(
        frozenset((record.hash_domain, record.kv_rules) for record in used),
        [ledgers[arena_id] for arena_id in ids if arena_id in ledgers],
        ids <= ledgers.keys(),
    )
