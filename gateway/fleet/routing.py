"""Chooses the prefill and the decode worker of a request. This module does no I/O; callers pass the current time.

A request takes the route with the least predicted cost. This is the sum of the times for the queue and prefill at a
prefill worker, for a copy if the decode worker uses another arena, and for the decode in that worker's batch
(`gateway.fleet.costs`), and of what sequences lose meanwhile (`gateway.fleet.sharing`). A prefix that is cached in
another arena is therefore copied or computed again, whichever is predicted to take less time. Workers that have
recently failed a request are avoided while there is a choice. The decode worker is chosen after prefill, by the loads
at that time. Load is counted at dispatch, because reports arrive late; the larger of the count and the report is used.
Of equally good workers, the one that was picked longest ago is chosen.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from common.types import Role, WorkerLoad, WorkerRecord
from gateway.fleet import sharing
from gateway.fleet.costs import RouteCosts, Speeds
from gateway.fleet.sharing import STALL_WEIGHT, Batch, Prediction, Prompts, Targets
from gateway.fleet.worker_state import Considered, Pick, WorkerState

SUSPECT_S = 2.0
"""Time in seconds for which a worker that has failed a request is avoided while there is a choice."""
UNREACHABLE_S = 4.0
"""Time in seconds for which a prefill worker that could not be reached gets no requests, and for which no blocks are
copied between two arenas after a block store did not answer. A successor of the worker has a different address and is
used at once.
"""
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
        self.targets = Targets()
        """Routes that are predicted to keep these limits are preferred."""
        self.disaggregates = True
        """Whether a prompt may be computed in another process than the one that decodes it."""
        self._at: dict[tuple[str, Role], WorkerState] = {}
        """The workers by address and role. Workers with the same address share a process."""
        self._picks = 0

    def update(self, records: Iterable[WorkerRecord], now: float) -> None:
        """Applies the registry's list: adds new workers, removes missing workers, and refreshes loads."""
        fresh = {record.worker_id: record for record in records}
        for worker_id in [w for w in self.workers if w not in fresh]:
            del self.workers[worker_id]
        for worker_id, record in fresh.items():
            state = self.workers.get(worker_id)
            if state is None or state.record.address != record.address:
                state = self.workers[worker_id] = WorkerState(record, stepped_at=now)
            state.record = record
            if now - state.reported_at > PUBLISHED_S:  # the registry may be older than a report
                state.note_load(record.load, now, has_stepped=record.load.num_running > 0)
        self._at = {(state.record.address, state.record.role): state for state in self.workers.values()}
        self.costs.keep(record.arena_id for record in fresh.values())

    def report(self, worker_id: str, load: WorkerLoad, now: float) -> None:
        """Records a load report from a worker."""
        if (state := self.workers.get(worker_id)) is not None:
            state.reported_at = now
            state.note_load(load, now, has_stepped=True)

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
        """Picks the prefill worker whose best route has the least predicted cost. Returns None if no reachable worker
        that has loaded the adapter has a partner. `usable` returns whether a decode worker can take the request.
        """
        prefills = [
            p for p in self._of_role("prefill") if p.unreachable_until <= now and p.record.has_adapter(asked.adapter)
        ]
        speeds = self._speeds(now)
        decodes = self._best_decodes(usable, asked.adapter, speeds, now)
        after: dict[tuple[str, str, str], Prediction | None] = {}
        found: dict[str, Prediction] = {}
        for prefill in prefills:
            record, missing = prefill.record, asked.missing(prefill.record.arena_id)
            key = record.pairing, record.arena_id, "" if self.disaggregates else record.address
            if key not in after:
                after[key] = self._after_prefill(record.arena_id, decodes.get((key[0], key[2]), {}), asked, now)
            if (rest := after[key]) is not None:
                prompts, batch = self._prompts_of(prefill, missing, speeds, now), self._batch_of(record, speeds, now)
                predicted = sharing.prefill(prompts, missing / speeds.prompt_tokens_per_s, batch)
                found[record.worker_id] = predicted.then(rest)
        pick = self._pick([self.workers[name] for name in found], lambda p: found[p.record.worker_id], asked, now)
        if pick is not None:
            pick.worker.recent.add(asked.missing(pick.record.arena_id), now, self.costs.group_s)
        return pick

    def pick_decode(self, route: Route, now: float, usable: Callable[[WorkerRecord], bool]) -> Pick | None:
        """Picks the decode worker with the least predicted cost after the route's prefill, among those that accept the
        prefill worker's tickets, are `usable` for the group and have loaded the adapter. Returns None if there is none.
        """
        return self._pick(*self._decodes(route, now, usable), route.asked, now)

    def destination(self, route: Route, now: float, usable: Callable[[WorkerRecord], bool]) -> str | None:
        """Returns the arena of the decode worker that `pick_decode` would pick now, or None if there is no worker."""
        ranked = self._ranked(*self._decodes(route, now, usable), now)
        return ranked[0][0].record.arena_id if ranked else None

    def _decodes(
        self, route: Route, now: float, usable: Callable[[WorkerRecord], bool]
    ) -> tuple[list[WorkerState], Callable[[WorkerState], Prediction]]:
        """Returns the decode workers that can continue a route's prefill, and the function that predicts the effects of
        choosing each of them.
        """
        prefill, asked, speeds = route.prefill, route.asked, self._speeds(now)

        def predict(decode: WorkerState) -> Prediction:
            destination = decode.record.arena_id
            copy_s = self.costs.copy_s(prefill.arena_id, destination, asked.missing(destination), now)
            predicted = self._predict_decode(decode, speeds, now)
            return replace(predicted, own_s=copy_s + predicted.own_s)

        return list(self._partners(prefill, usable, asked.adapter)), predict

    def capacity(self) -> int:
        """Returns the total batch size, in sequences, of the decode workers that are not draining."""
        return sum(d.record.max_num_seqs for d in self._of_role("decode"))

    def max_model_len(self) -> int | None:
        """Returns the length of the longest sequence that every worker accepts, or None if there are no workers."""
        return min((w.record.max_model_len for w in self.workers.values()), default=None)

    def _speeds(self, now: float) -> Speeds:
        return Speeds.of((w.load, w.step_weight(now, self.costs.group_s)) for w in self.workers.values())

    def _prompts_of(self, prefill: WorkerState, missing: int, speeds: Speeds, now: float) -> Prompts:
        """Returns the prompts at a prefill worker, with one more of `missing` tokens."""
        rate, group_s = speeds.prompt_tokens_per_s, self.costs.group_s
        recent_s = (prefill.recent.tokens_per_s(now, group_s) * group_s + missing) / rate
        return Prompts(prefill.tokens_before(now) + missing, rate, prefill.record.prefill_step, recent_s)

    def _batch_of(self, record: WorkerRecord, speeds: Speeds, now: float) -> Batch:
        """Returns the sequences at the decode worker in the process of `record`."""
        decode = self._at.get((record.address, "decode"))
        if decode is None:
            return Batch()
        num_running = min(decode.sequences(now), decode.record.max_num_seqs)
        step = speeds.step_of(decode.load, decode.step_weight(now, self.costs.group_s))
        return Batch(num_running, step, self.costs.group_s, self.costs.group_steps)

    def _predict_decode(self, decode: WorkerState, speeds: Speeds, now: float) -> Prediction:
        """Predicts the decoding of one more group at a worker."""
        prefill, prompts = self._at.get((decode.record.address, "prefill")), Prompts()
        if prefill is not None:
            prompts = self._prompts_of(prefill, 0, speeds, now)
        batch = self._batch_of(decode.record, speeds, now)
        return sharing.decode(self.costs.decode_s(decode.share(now), batch.step_s(1)), batch, prompts)

    def _best_decodes(
        self, usable: Callable[[WorkerRecord], bool], adapter: str, speeds: Speeds, now: float
    ) -> dict[tuple[str, str], dict[str, Prediction]]:
        """Returns the prediction for the best decode worker of each arena, by pairing and arena, with the least cost
        first. Unless prompts may be computed in other processes, each process is listed
        separately, by pairing and address. Considers only workers that are usable and have loaded the adapter.
        """
        found: dict[tuple[str, str], dict[str, Prediction]] = defaultdict(dict)
        decodes = [d for d in self._of_role("decode") if usable(d.record) and d.record.has_adapter(adapter)]
        predictions = [(decode.record, self._predict_decode(decode, speeds, now)) for decode in decodes]
        for record, predicted in sorted(predictions, key=lambda item: item[1].cost_s):
            place = record.pairing, "" if self.disaggregates else record.address
            found[place].setdefault(record.arena_id, predicted)
        return found

    def _after_prefill(
        self, source: str, decodes: Mapping[str, Prediction], asked: Asked, now: float
    ) -> Prediction | None:
        """Predicts the cheapest rest of a route after a prefill in this arena, or returns None if no decode worker
        accepts the ticket. `decodes` is a value of `_best_decodes`.

        Skips arenas that cannot be better than those considered before, because a large fleet has many pairs of arenas.
        """
        best = decodes.get(source)
        least_s = math.inf if best is None else best.cost_s
        for destination, decode in decodes.items():
            if decode.cost_s >= least_s:
                break
            if self._reaches(source, destination):
                own_s = self.costs.copy_s(source, destination, asked.missing(destination), now) + decode.own_s
                if (cost_s := own_s + STALL_WEIGHT * decode.delay_s) < least_s:
                    best, least_s = replace(decode, own_s=own_s), cost_s
        return best

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
        if not self.disaggregates:
            return [d for d in decodes if d.record.address == prefill.address]
        return [d for d in decodes if self._reaches(prefill.arena_id, d.record.arena_id)]

    def _reaches(self, source: str, destination: str) -> bool:
        if source == destination:
            return True
        is_possible = source in self.stores and self.stores.get(destination, False)
        return is_possible and (source, destination) not in self.broken

    def _pick(
        self, states: list[WorkerState], predict: Callable[[WorkerState], Prediction], asked: Asked, now: float
    ) -> Pick | None:
        if not (ranked := self._ranked(states, predict, now)):
            return None
        considered = tuple(
            Considered(s.record.worker_id, p.own_s, asked.missing(s.record.arena_id), p.delay_s, p.itl_s)
            for s, p in ranked
        )
        best = ranked[0][0]
        self._picks += 1
        best.picked = self._picks
        return Pick(best, considered)

    def _ranked(
        self, states: list[WorkerState], predict: Callable[[WorkerState], Prediction], now: float
    ) -> list[tuple[WorkerState, Prediction]]:
        """Returns the best workers, best first, with their predictions: those that keep the targets come first, and
        among these and among the others, the cheapest. Leaves out suspect workers if there are others.
        """

        def rank(item: tuple[WorkerState, Prediction]) -> tuple[bool, float, int]:
            state, predicted = item
            return not predicted.keeps(self.targets), predicted.cost_s, state.picked

        trusted = [s for s in states if s.suspect_until <= now] or states
        return heapq.nsmallest(MOST_CONSIDERED, [(state, predict(state)) for state in trusted], key=rank)
