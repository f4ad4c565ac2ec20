"""Chooses the prefill and the decode worker of a request. Plain Python: no I/O, the time is an argument.

Prefill: the worker that has the fewest prompt tokens to compute until this prompt is complete (the queued tokens + the
prompt's tokens that are not cached). Decode: the worker that has the fewest sequences for its size. Load is counted at
dispatch, because reports arrive late, and the larger of the count and the report is used. If several workers are equal,
the one that was picked longest ago is chosen, so that the load is spread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from common.types import WorkerLoad, WorkerRecord

SUSPECT_S = 2.0
"""Time for which a worker that has failed a request is avoided while there is a choice."""
UNREACHABLE_S = 4.0
"""Time for which a prefill worker that could not be reached gets no requests. This is longer than the time for which
the registry still lists a dead worker. The worker's successor has a different address and is used at once.
"""
REPORT_S = 3.0
"""Load reports older than this are ignored."""

PULL_COST = 1.0
"""Added to a decode worker's load, in full batches, if blocks must be copied to its arena."""


@dataclass(slots=True)
class WorkerState:
    """The router's data about one worker."""

    record: WorkerRecord
    load: WorkerLoad = field(default_factory=WorkerLoad)
    load_at: float = float("-inf")
    dispatched_tokens: int = 0
    """Number of prompt tokens that this gateway has sent and that have not been prefilled."""
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


class Router:
    """A table of the known workers, and the policy that picks the workers for a request."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerState] = {}
        self.stores: Mapping[str, bool] = {}
        """The arenas with a live block store, and whether that store copies blocks from other arenas."""
        self.broken: Collection[tuple[str, str]] = ()
        """Pairs of arenas (source, destination) between which a recent copy failed because a store did not answer."""
        self._picks = 0

    def update(self, records: Iterable[WorkerRecord], now: float) -> None:
        """Applies the registry's list: adds new workers, removes missing ones, refreshes loads."""
        fresh = {record.worker_id: record for record in records}
        for worker_id in [w for w in self.workers if w not in fresh]:
            del self.workers[worker_id]
        for worker_id, record in fresh.items():
            state = self.workers.get(worker_id)
            if state is None or state.record.address != record.address:
                self.workers[worker_id] = WorkerState(record, record.load, now)
            else:
                state.record = record
                self.report(worker_id, record.load, now)

    def report(self, worker_id: str, load: WorkerLoad, now: float) -> None:
        """Records a load report from a worker."""
        if (state := self.workers.get(worker_id)) is not None:
            state.load, state.load_at = load, now

    def suspect(self, worker_id: str, now: float) -> None:
        """Notes that the worker has failed a request. Routing avoids it for a while."""
        if (state := self.workers.get(worker_id)) is not None:
            state.suspect_until = now + SUSPECT_S

    def unreachable(self, worker_id: str, now: float) -> None:
        """Notes that there was no answer at the worker's address."""
        if (state := self.workers.get(worker_id)) is not None:
            state.unreachable_until = now + UNREACHABLE_S

    def failed(self, record: WorkerRecord, now: float) -> bool:
        """Returns whether the worker is gone, or should be avoided if there is a choice."""
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

    def pick_prefill(
        self,
        prompt_len: int,
        cached_tokens: Mapping[str, int],
        now: float,
        usable: Callable[[WorkerRecord], bool],
        adapter: str = "",
    ) -> WorkerState | None:
        """Picks the prefill worker with the fewest tokens to compute until the prompt is complete, or None if no worker
        has a partner.

        `cached_tokens` is per arena, because the workers of an arena share its blocks. `usable` returns whether a
        decode worker can take the request. Both workers must have loaded `adapter`.
        """
        partnered = [
            p
            for p in self._of_role("prefill")
            if p.unreachable_until <= now
            and p.record.has_adapter(adapter)
            and any(self._partners(p.record, usable, adapter))
        ]

        def cost(state: WorkerState) -> float:
            return state.tokens_before(now) + max(1, prompt_len - cached_tokens.get(state.record.arena_id, 0))

        return self._least(partnered, cost, now)

    def pick_decode(
        self, prefill: WorkerRecord, now: float, usable: Callable[[WorkerRecord], bool], adapter: str = ""
    ) -> WorkerState | None:
        """Picks the decode worker with the fewest sequences for its size, among those that accept the prefill worker's
        tickets, are `usable` for the group and have loaded `adapter`; returns None if there is none. `PULL_COST` is
        added to the load of a worker in another arena, to which the blocks must be copied.
        """

        def cost(decode: WorkerState) -> float:
            share = decode.sequences(now) / max(1, decode.record.max_num_seqs)
            return share if decode.record.arena_id == prefill.arena_id else share + PULL_COST

        return self._least(list(self._partners(prefill, usable, adapter)), cost, now)

    def capacity(self) -> int:
        """Returns the total batch capacity of all decode workers, in sequences."""
        return sum(d.record.max_num_seqs for d in self._of_role("decode"))

    def max_model_len(self) -> int | None:
        """Returns the length of the longest sequence that every worker accepts, or None if there are no workers."""
        return min((w.record.max_model_len for w in self.workers.values()), default=None)

    def _of_role(self, role: str) -> list[WorkerState]:
        return [w for w in self.workers.values() if w.record.role == role and not w.record.draining]

    def _partners(
        self, prefill: WorkerRecord, usable: Callable[[WorkerRecord], bool], adapter: str
    ) -> Iterator[WorkerState]:
        """Yields the usable decode workers that accept a prefill worker's tickets and have loaded `adapter`."""
        return (d for d in self._decodes_for(prefill) if usable(d.record) and d.record.has_adapter(adapter))

    def _decodes_for(self, prefill: WorkerRecord) -> list[WorkerState]:
        """Returns the decode workers that accept a prefill worker's tickets. They must have the same pairing
        fingerprint, and be in the same arena or in one to which blocks can be copied.
        """
        decodes = [d for d in self._of_role("decode") if d.record.pairing == prefill.pairing]
        return [d for d in decodes if self._reaches(prefill.arena_id, d.record.arena_id)]

    def _reaches(self, source: str, destination: str) -> bool:
        if source == destination:
            return True
        is_possible = source in self.stores and self.stores.get(destination, False)
        return is_possible and (source, destination) not in self.broken

    def _least(self, states: list[WorkerState], cost: Callable[[WorkerState], float], now: float) -> WorkerState | None:
        trusted = [s for s in states if s.suspect_until <= now] or states
        if not trusted:
            return None
        best = min(trusted, key=lambda s: (cost(s), s.picked))
        self._picks += 1
        best.picked = self._picks
        return best
