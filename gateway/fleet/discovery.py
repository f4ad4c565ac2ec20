"""Polls the registry in Redis, passes on the known workers and block stores, and looks up cached prefixes for routing.
Redis is called in threads, and lookups have a time budget.

Without Redis, the gateway routes by load alone, to the known workers. After a few unanswered lookups or a failed poll,
requests skip the lookup until a poll is answered within a lookup's time budget. When Redis comes back, its list of
workers may be lost or old. No worker therefore counts as gone until all workers have had time to register again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from block_store.errors import BlockStoreError, LedgerDamaged, LedgerUnavailable, StaleDataset
from block_store.ledger.breaker import Breaker
from block_store.ledger.prefix_hash import adapter_domain, group_hash, hash_blocks, prompt_chain
from block_store.ledger.prefix_lengths import PrefixLengths
from block_store.ledger.scripts import CHUNK, LedgerScripts
from block_store.redis.redis_server import open_client
from block_store.redis.registry import WorkerRegistry
from common.kv_retention import KvRules
from common.telemetry import Fallbacks
from common.ticket import Ticket
from common.types import WorkerRecord
from gateway.fleet.pull_client import StoreAddress
from gateway.intake.resolved_request import ResolvedRequest

logger = logging.getLogger("discovery")
T = TypeVar("T")
LOOKUP_BUDGET_S = 0.05
MAX_UNANSWERED = 3
"""Number of consecutive unanswered lookups that opens the breaker. A single unanswered lookup may only mean that Redis
is busy.
"""
CHECKS = 5
CHECK_PAUSE_S = 0.3
"""Seconds between two of the calls that `check` makes."""
FIRST_POLL_S = 0.05
"""Interval in seconds between polls while there is no worker. It is short, because a deployment that starts waits for
its workers to join.
"""
GRACE_S = 5.0
"""For this time, in seconds, after Redis was silent or lost its data, missing workers do not count as gone. Workers
publish every second.
"""


class Discovery:
    """A client of one Redis server. It polls the registry, looks up prefixes in the ledgers of the registry's arenas,
    and ends tickets.
    """

    def __init__(
        self,
        redis_url: str,
        poll_s: float,
        on_records: Callable[[list[WorkerRecord]], None],
        grace_s: float = GRACE_S,
        on_stores: Callable[[Mapping[str, StoreAddress]], None] = lambda _: None,
    ) -> None:
        """After a successful poll, `on_records` receives the known workers, and `on_stores` the block stores of their
        arenas by arena id.
        """
        self._grace_s = grace_s
        self._client = open_client(redis_url)
        self._registry = WorkerRegistry(self._client)
        self._lengths = PrefixLengths(self._client)
        self._poll_s = poll_s
        self._on_records = on_records
        self._on_stores = on_stores
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="redis")
        self._ledgers: dict[str, LedgerScripts] = {}
        self.fallbacks = Fallbacks(logger)
        self.breaker = Breaker("routing")
        self._unanswered = 0
        """Number of consecutive lookups without an answer."""
        self._known: frozenset[tuple[str, str]] = frozenset()
        self._records: dict[str, WorkerRecord] = {}
        self._incarnation = b""
        self._complete_at = 0.0
        """The time from which a worker that is missing in the registry counts as gone."""

    async def run(self) -> None:
        """Polls until cancelled. While Redis is silent, the last list stays valid."""
        while True:
            began = time.monotonic()
            try:
                found = await self._in_thread(self._registry.list)
                fast = time.monotonic() - began < LOOKUP_BUDGET_S
                self._take(found)
                self._ledgers, stores = await self._in_thread(self._open_ledgers)
                self._on_stores(stores)
                if fast:
                    self.breaker.close()
            except BlockStoreError as error:
                self.breaker.open(error)
                self._complete_at = time.monotonic() + self._grace_s
                self.fallbacks.note("registry", f"{error}; continuing with the known workers")
            except Exception:
                logger.exception("a poll of the registry failed")
            await asyncio.sleep(self._poll_s if self._known else min(self._poll_s, FIRST_POLL_S))

    async def check(self) -> None:
        """Calls the registry, and repeats the call if Redis does not answer, because Redis may have to wait for a core.
        Raises LedgerUnavailable if `CHECKS` calls are not answered.
        """
        for tries_left in reversed(range(CHECKS)):
            try:
                await self._in_thread(self._registry.list)
                return
            except LedgerUnavailable:
                if not tries_left:
                    raise
            await asyncio.sleep(CHECK_PAUSE_S)

    @property
    def skipped(self) -> Mapping[str, int]:
        """The counts of unreadable registry entries. An entry is counted again at every poll."""
        return self._registry.fallbacks.counts

    @property
    def ledgers(self) -> Mapping[str, LedgerScripts]:
        """Clients of the ledgers of the known arenas, by arena id."""
        return self._ledgers

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    async def cached_tokens(self, workers: Iterable[WorkerRecord], request: ResolvedRequest) -> dict[str, int]:
        """Returns the number of leading tokens of the prompt that prefill would find in each arena whose ledger is
        known, by arena id. The result is empty if the lookup fails or is not answered in time. While the breaker is
        open, the call returns an empty result at once, and `breaker.num_refused` counts the call.
        """
        if self.breaker.refuses():
            return {}
        by_arena = {record.arena_id: record for record in workers}
        try:
            async with asyncio.timeout(LOOKUP_BUDGET_S):
                found = await self._in_thread(lambda: self._lookup(by_arena, request))
        except (TimeoutError, BlockStoreError) as error:
            self._lookup_failed(error)
            return {}
        self._unanswered = 0
        return found

    async def end_ticket(self, ticket: Ticket) -> None:
        """Ends a ticket that no worker will claim. If the ticket's ledger is not known or does not answer, or if the
        breaker is open, the ticket ends with its lease.
        """
        if (ledger := self._ledgers.get(ticket.arena_id)) is None or self.breaker.is_open:
            return
        try:
            await self._in_thread(lambda: ledger.give_up(ticket.id))
        except BlockStoreError as error:
            logger.info("ticket %d expires with its lease: %s", ticket.id.epoch, error)

    def _lookup_failed(self, error: Exception) -> None:
        self.fallbacks.note("lookup", f"{type(error).__name__}; routing by load alone")
        if not isinstance(error, TimeoutError | LedgerUnavailable):
            return  # Redis answered, but its answer cannot be used
        self._unanswered += 1
        if self._unanswered >= MAX_UNANSWERED:
            self._unanswered = 0
            self.breaker.open(f"{MAX_UNANSWERED} lookups in a row had no answer in {LOOKUP_BUDGET_S * 1000:.0f} ms")

    def _lookup(self, by_arena: dict[str, WorkerRecord], request: ResolvedRequest) -> dict[str, int]:
        alike: dict[tuple[str, KvRules], dict[str, LedgerScripts]] = defaultdict(dict)
        for arena_id, record in by_arena.items():
            if (ledger := self._ledgers.get(arena_id)) is not None:
                alike[record.hash_domain, record.kv_rules][arena_id] = ledger
        found: dict[str, int] = {}
        for (domain, rules), ledgers in alike.items():  # arenas of one model differ only in their contents
            hashes = _prompt_hashes(request, domain, rules.block_size)
            lengths = cached_blocks(self._lengths, list(ledgers.values()), hashes, rules)
            found |= {arena_id: length * rules.block_size for arena_id, length in zip(ledgers, lengths, strict=True)}
        return found

    def _open_ledgers(self) -> tuple[dict[str, LedgerScripts], dict[str, StoreAddress]]:
        """Returns a client of the ledger and the address of the block store, for every arena that workers name and
        whose block store is in the registry. A client is kept as long as the ledger's dataset generation does not
        change.
        """
        ledgers: dict[str, LedgerScripts] = {}
        stores: dict[str, StoreAddress] = {}
        arenas = {arena for _, arena in self._known}
        for store in self._registry.list_stores() if arenas else ():
            if (arena_id := store.arena_id) in arenas:
                stores[arena_id] = StoreAddress(store.address, store.pulls)
                old = self._ledgers.get(arena_id)
                same = old is not None and old.dataset == store.dataset
                ledgers[arena_id] = old if same and old else LedgerScripts(self._client, arena_id, store.dataset)
        return ledgers, stores

    def _take(self, found: list[WorkerRecord]) -> None:
        if self._incarnation and self._registry.incarnation != self._incarnation:
            self._complete_at = time.monotonic() + self._grace_s
        self._incarnation = self._registry.incarnation
        before = self._records if time.monotonic() < self._complete_at else {}
        self._records = before | {record.worker_id: record for record in found}
        records = list(self._records.values())
        known = frozenset((record.worker_id, record.arena_id) for record in records)
        for worker_id, _ in known - self._known:
            logger.info("worker %s has joined", worker_id)
        for worker_id, _ in self._known - known:
            logger.info("worker %s has left", worker_id)
        self._known = known
        self._on_records(records)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _prompt_hashes(request: ResolvedRequest, hash_domain: str, size: int) -> list[bytes]:
    """Returns the hashes of the blocks of the longest prefix that may be cached. This prefix excludes the last token,
    because prefill must compute at least one token.
    """
    ids = request.prompt_ids
    domain = adapter_domain(bytes.fromhex(hash_domain), bytes.fromhex(request.adapter_digest))
    start, rekey = prompt_chain(domain, request.salt, ids, request.public_tokens, size)
    return list(hash_blocks(start, ids, size, rekey=rekey)[: (len(ids) - 1) // size])


def cached_blocks(
    lengths: PrefixLengths, ledgers: Sequence[LedgerScripts], hashes: Sequence[bytes], rules: KvRules
) -> list[int]:
    """Returns, for each ledger, the number of blocks in the longest cached prefix from which all KV groups can continue
    (compare `worker.cached_prefix.find_prefix`). For a ledger that has been rebuilt or is damaged, the number is 0.
    """
    full = [number for number, group in enumerate(rules.groups) if not group.slides]
    reach = [len(hashes)] * len(ledgers)
    for number in full:
        found = lengths.find(ledgers, [group_hash(each, number) for each in hashes])
        reach = [min(most, length or 0) for most, length in zip(reach, found, strict=True)]
    if len(full) == len(rules.groups):
        return reach
    return [
        _usable(ledger, hashes[:most], rules, has_full=bool(full)) for ledger, most in zip(ledgers, reach, strict=True)
    ]


def _usable(ledger: LedgerScripts, hashes: Sequence[bytes], rules: KvRules, *, has_full: bool) -> int:
    """Returns the length, in blocks, of the longest prefix of these blocks from which the groups with windows and
    states can continue. If the model also has full attention (`has_full`), checks only the blocks near the end of the
    prefix.
    """
    reach = len(hashes)
    if not reach:
        return 0
    sliding = [number for number, group in enumerate(rules.groups) if group.slides]
    needed = max(reach - rules.first_needed(number, reach) for number in sliding)
    start = max(0, reach - max(needed, CHUNK // len(sliding))) if has_full else 0
    asked = [group_hash(each, number) for number in sliding for each in hashes[start:]]
    try:
        marks = iter(ledger.present(asked))
    except (StaleDataset, LedgerDamaged):
        return 0
    return rules.usable_length({number: [next(marks) for _ in hashes[start:]] for number in sliding}, start)
