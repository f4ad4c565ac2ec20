"""Chooses the prefill and the decode worker of a request. This module does no I/O; callers pass the current time.

A request takes the route with the least predicted time. This is the sum of the times for the queue and prefill at a
prefill worker, for a copy if the decode worker uses another arena, and for the delay in that worker's batch
(`gateway.fleet.costs`). A prefix that is cached in another arena is therefore copied or computed again, whichever is
predicted to take less time. Workers that have recently failed a request are avoided while there is a choice. The decode
worker is chosen after prefill, by the loads at that time. Load is counted at dispatch, because reports arrive late, and
the larger of the count and the report is used. Of workers that are equally good, the one that was picked longest ago is
chosen, so that the load is spread.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from common.types import WorkerLoad, WorkerRecord
from gateway.fleet.costs import RouteCosts

SUSPECT_S = 2.0
"""Time in seconds for which a worker that has failed a request is avoided while there is a choice."""
UNREACHABLE_S = 4.0
"""Time in seconds for which a prefill worker that could not be reached gets no requests, and for which no blocks are
copied between two arenas after a block store did not answer. A successor of the worker has a different address and is
used at once.
"""
REPORT_S = 3.0
"""Load reports that are older than this number of seconds are ignored."""
MOST_CONSIDERED = 8
"""Maximum number of workers that a pick names as considered."""
PUBLISHED_S = 1.5
"""Assumed age of a load in the registry, in seconds. Workers publish every second, and gateways poll (`--poll-s`)."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The properties of a request that routing considers."""

    num_tokens: int
    """Length of the prompt, whose KV decode needs."""
    cached: Mapping[str, int] = field(default_factory=dict)
    """The number of leading tokens that are in the prefix cache, by arena."""
    adapter: str = ""
    """Digest of the LoRA adapter that both workers must have loaded; "" means the base model."""

    def missing(self, arena_id: str) -> int:
        """Returns the number of tokens, at least 1, whose KV must be computed in an arena or copied to it."""
        return max(1, self.num_tokens - self.cached.get(arena_id, 0))


@dataclass(slots=True)
class WorkerState:
    """The router's record of one worker."""

    record: WorkerRecord
    load: WorkerLoad = field(default_factory=WorkerLoad)
    load_at: float = float("-inf")
    reported_at: float = float("-inf")
    """When the worker last reported its load to this gateway. The load may also come from the registry."""
    dispatched_tokens: int = 0
    """Number of tokens in this gateway's current prefill calls to the worker: prompts, and outputs of earlier attempts.
    """
    dispatched_sequences: int = 0
    """Number of sequences that this gateway has sent and that have not ended."""
    suspect_until: float = float("-inf")
    unreachable_until: float = float("-inf")
    picked: int = 0

    def tokens_before(self, now: float) -> int:
        reported = self.load.waiting_tokens if now - self.load_at < REPORT_S else 0
        return max(self.dispatched_tokens, reported)

    def sequences(self, now: float) -> int:
        load = self.load if now - self.load_at < REPORT_S else WorkerLoad()
        return max(self.dispatched_sequences, load.num_running + load.num_waiting + load.num_preempted)

    def share(self, now: float) -> float:
        """Returns the number of sequences at a decode worker as a fraction of the worker's largest batch."""
        return self.sequences(now) / max(1, self.record.max_num_seqs)


@dataclass(frozen=True, slots=True)
class Considered:
    """A worker that was compared with others, with the prediction by which it was ranked."""

    worker_id: str
    predicted_s: float
    """The predicted time by which workers are compared: of the whole route for a prefill worker, and of the rest of the
    route for a decode worker.
    """
    missing_tokens: int
    """Number of prompt tokens, at least 1, that are not cached in the worker's arena."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The worker that was picked, and the best of the workers that were considered, best first."""

    worker: WorkerState
    considered: tuple[Considered, ...]

    @property
    def record(self) -> WorkerRecord:
        return self.worker.record


@dataclass(frozen=True, slots=True)
class Route:
    """The prefill worker chosen for a request, and the properties by which the decode worker will be chosen."""

    prefill: WorkerRecord
    asked: Asked
    considered: tuple[Considered, ...] = ()
    """The prefill workers that were considered, the best first."""


class Router:
    """A table of the known workers, and the policy that picks the workers for a request."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerState] = {}
        self.costs = RouteCosts()
        self.stores: Mapping[str, bool] = {}
        """The arenas with a block store in the registry. The value is whether the store copies blocks from other
        arenas.
        """
        self.broken: Collection[tuple[str, str]] = ()
        """Pairs of arenas (source, destination) between which a recent copy failed because a store did not answer."""
        self._picks = 0

    def update(self, records: Iterable[WorkerRecord], now: float) -> None:
        """Applies the registry's list: adds new workers, removes missing workers, and refreshes loads."""
        fresh = {record.worker_id: record for record in records}
        for worker_id in [w for w in self.workers if w not in fresh]:
            del self.workers[worker_id]
        for worker_id, record in fresh.items():
            state = self.workers.get(worker_id)
            if state is None or state.record.address != record.address:
                self.workers[worker_id] = WorkerState(record, record.load, now)
            else:
                state.record = record
                if now - state.reported_at > PUBLISHED_S:  # the registry may be older than a report
                    state.load, state.load_at = record.load, now
        self.costs.keep(record.arena_id for record in fresh.values())

    def report(self, worker_id: str, load: WorkerLoad, now: float) -> None:
        """Records a load report from a worker."""
        if (state := self.workers.get(worker_id)) is not None:
            state.load, state.load_at, state.reported_at = load, now, now

    def suspect(self, worker_id: str, now: float) -> None:
        """Notes that the worker has failed a request. For a while, routing avoids the worker if there is a choice."""
        if (state := self.workers.get(worker_id)) is not None:
            state.suspect_until = now + SUSPECT_S

    def unreachable(self, worker_id: str, now: float) -> None:
        """Notes that the worker could not be reached. For a while, the worker gets no prompts."""
        if (state := self.workers.get(worker_id)) is not None:
            state.unreachable_until = now + UNREACHABLE_S

    def failed(self, record: WorkerRecord, now: float) -> bool:
        """Returns whether the worker is gone, suspect or unreachable."""
        state = self.workers.get(record.worker_id)
        if state is None or state.record.address != record.address:
            return True
        return max(state.suspect_until, state.unreachable_until) > now

    def ready(self, usable: Callable[[WorkerRecord], bool], adapter: str = "") -> bool:
        """Returns whether there is a prefill worker and a usable decode worker that can exchange tickets and have
        loaded `adapter`.
        """
        prefills = (p.record for p in self._of_role("prefill") if p.record.has_adapter(adapter))
        return any(any(self._partners(prefill, usable, adapter)) for prefill in prefills)

    def pick_prefill(self, asked: Asked, now: float, usable: Callable[[WorkerRecord], bool]) -> Pick | None:
        """Picks the prefill worker whose best route has the least predicted time. Returns None if no reachable worker
        that has loaded the adapter has a partner. `usable` returns whether a decode worker can take the request.
        """
        shares = self._shares(usable, asked.adapter, now)
        prefills = [
            p for p in self._of_role("prefill") if p.unreachable_until <= now and p.record.has_adapter(asked.adapter)
        ]
        rate = self.costs.prefill_rate(p.load for p in prefills)
        after: dict[tuple[str, str], float] = {}
        costs: dict[str, float] = {}
        for prefill in prefills:
            arena_id, key = prefill.record.arena_id, (prefill.record.pairing, prefill.record.arena_id)
            if key not in after:
                after[key] = self._after_prefill_s(arena_id, shares.get(prefill.record.pairing, {}), asked, now)
            num_tokens = prefill.tokens_before(now) + asked.missing(arena_id)
            costs[prefill.record.worker_id] = num_tokens / rate + after[key]
        partnered = [p for p in prefills if costs[p.record.worker_id] < math.inf]
        return self._pick(partnered, lambda p: costs[p.record.worker_id], asked, now)

    def pick_decode(self, route: Route, now: float, usable: Callable[[WorkerRecord], bool]) -> Pick | None:
        """Picks the decode worker with the least predicted time after the route's prefill, among those that accept the
        prefill worker's tickets, are `usable` for the group and have loaded the adapter. Returns None if there is no
        such worker.
        """
        return self._pick(*self._decodes(route, now, usable), route.asked, now)

    def destination(self, route: Route, now: float, usable: Callable[[WorkerRecord], bool]) -> str | None:
        """Returns the arena of the decode worker that `pick_decode` would pick now, or None if there is no worker."""
        ranked = self._ranked(*self._decodes(route, now, usable), now)
        return ranked[0].record.arena_id if ranked else None

    def _decodes(
        self, route: Route, now: float, usable: Callable[[WorkerRecord], bool]
    ) -> tuple[list[WorkerState], Callable[[WorkerState], float]]:
        """Returns the decode workers that can continue a route's prefill, and the function that predicts the time in
        seconds that each of them would take.
        """
        prefill, asked = route.prefill, route.asked

        def cost(decode: WorkerState) -> float:
            destination = decode.record.arena_id
            copy_s = self.costs.copy_s(prefill.arena_id, destination, asked.missing(destination), now)
            return copy_s + self.costs.decode_s(decode.share(now))

        return list(self._partners(prefill, usable, asked.adapter)), cost

    def capacity(self) -> int:
        """Returns the total batch size, in sequences, of the decode workers that are not draining."""
        return sum(d.record.max_num_seqs for d in self._of_role("decode"))

    def max_model_len(self) -> int | None:
        """Returns the length of the longest sequence that every worker accepts, or None if there are no workers."""
        return min((w.record.max_model_len for w in self.workers.values()), default=None)

    def _shares(self, usable: Callable[[WorkerRecord], bool], adapter: str, now: float) -> dict[str, dict[str, float]]:
        """Returns, by pairing and arena, the share of the batch that is occupied at the arena's emptiest decode worker,
        with the smallest share first. Considers only workers that are usable and have loaded the adapter.
        """
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for decode in sorted(self._of_role("decode"), key=lambda decode: decode.share(now)):
            record = decode.record
            if usable(record) and record.has_adapter(adapter):
                found[record.pairing].setdefault(record.arena_id, decode.share(now))
        return found

    def _after_prefill_s(self, source: str, shares: Mapping[str, float], asked: Asked, now: float) -> float:
        """Returns the least time in seconds that a request is predicted to lose after a prefill in this arena, or
        infinity if no decode worker accepts the ticket. `shares` is the result of `_shares` for one pairing.

        Skips arenas that cannot be better than those considered before, because a large fleet has many pairs of arenas.
        """
        least = self.costs.decode_s(shares[source]) if source in shares else math.inf
        for destination, share in shares.items():
            decode_s = self.costs.decode_s(share)
            if decode_s >= least:
                break
            if self._reaches(source, destination):
                least = min(least, decode_s + self.costs.copy_s(source, destination, asked.missing(destination), now))
        return least

    def _of_role(self, role: str) -> list[WorkerState]:
        return [w for w in self.workers.values() if w.record.role == role and not w.record.draining]

    def _partners(
        self, prefill: WorkerRecord, usable: Callable[[WorkerRecord], bool], adapter: str
    ) -> Iterator[WorkerState]:
        """Yields the usable decode workers that accept a prefill worker's tickets and have loaded `adapter`."""
        return (d for d in self._decodes_for(prefill) if usable(d.record) and d.record.has_adapter(adapter))

    def _decodes_for(self, prefill: WorkerRecord) -> list[WorkerState]:
        """Returns the decode workers that accept a prefill worker's tickets. A decode worker must have the same pairing
        fingerprint, and be in the same arena or in an arena to which blocks can be copied.
        """
        decodes = [d for d in self._of_role("decode") if d.record.pairing == prefill.pairing]
        return [d for d in decodes if self._reaches(prefill.arena_id, d.record.arena_id)]

    def _reaches(self, source: str, destination: str) -> bool:
        if source == destination:
            return True
        is_possible = source in self.stores and self.stores.get(destination, False)
        return is_possible and (source, destination) not in self.broken

    def _pick(
        self, states: list[WorkerState], cost: Callable[[WorkerState], float], asked: Asked, now: float
    ) -> Pick | None:
        if not (ranked := self._ranked(states, cost, now)):
            return None
        best, *others = ranked
        considered = tuple(
            Considered(s.record.worker_id, cost(s), asked.missing(s.record.arena_id)) for s in (best, *others)
        )
        self._picks += 1
        best.picked = self._picks
        return Pick(best, considered)

    @staticmethod
    def _ranked(states: list[WorkerState], cost: Callable[[WorkerState], float], now: float) -> list[WorkerState]:
        """Returns the best workers, best first. Leaves out suspect workers if there are others."""
        trusted = [s for s in states if s.suspect_until <= now] or states
        return heapq.nsmallest(MOST_CONSIDERED, trusted, key=lambda s: (cost(s), s.picked))
