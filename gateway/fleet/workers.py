"""Combines all workers in one object, which picks workers for requests and keeps the connections to them.

The object joins the router (policy) with discovery, prefill calls and decode sessions (I/O). Load is counted at
dispatch: the load of prefill in this module, and the load of decode in `DecodePlace`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import convert
from common.group_need import GroupNeed, GroupRoom
from common.kv_retention import KvRules
from common.ticket import Ticket
from common.trust import NO_TRUST, Trust
from common.types import WorkerLoad, WorkerRecord
from gateway.admission.gate import Place
from gateway.fleet.decode_client import SessionPool
from gateway.fleet.decode_place import DecodePlace
from gateway.fleet.liveness import LivenessLimits
from gateway.fleet.prefill_client import OnEarly, PrefillClient
from gateway.fleet.routing import Asked, Route, Router
from gateway.fleet.sharing import Targets
from gateway.fleet.stores import Stores
from gateway.fleet.worker_lost import WorkerLost
from gateway.fleet.worker_state import WorkerState
from gateway.intake.group_limits import rooms_of
from gateway.intake.resolved_request import ResolvedRequest
from protos.v1 import prefill_pb2
from protos.v1 import types_pb2 as types_pb

Lookup = Callable[[Sequence[WorkerRecord], ResolvedRequest], Awaitable[dict[str, int]]]
EndTicket = Callable[[Ticket], Coroutine[Any, Any, None]]
GATE_FACTOR = 1.25
GATE_EXTRA = 8
"""The gate lets in `GATE_FACTOR` times as many sequences as decode can batch, plus `GATE_EXTRA`, because some of them
are in prefill.
"""
JOIN_POLL_S = 0.05
ROOM_PER_SEQUENCE = 2
"""Free blocks required per KV group and sequence of a returning group, in addition to the blocks that the group needs
to continue. With fewer blocks, the group might soon be given back again.
"""


class Workers:
    """The set of workers in the registry, with the connections to them."""

    def __init__(
        self,
        limits: LivenessLimits,
        trust: Trust = NO_TRUST,
        restarts_file: Path | None = None,
        *,
        await_workers: bool = False,
        early_tokens: int | None = None,
    ) -> None:
        """`restarts_file` exists while a launcher restarts a service. `await_workers` says that an orchestrator
        restarts workers. `early_tokens` is the minimum number of tokens of an early pull: 0 switches early pulls off,
        and None means the number that measured copies suggest.
        """
        self._early_tokens = early_tokens
        self._restarts_file = restarts_file
        self._await_workers = await_workers
        self._router = Router()
        self._sessions = SessionPool(self._on_load, limits, trust)
        self._usable = self._sessions.usable
        self._prefills = PrefillClient(self._on_load, limits.silence_s, trust, self._on_unread)
        self.stores = Stores(self._router, trust)
        self._ready_at = -math.inf
        self.group_rooms: set[GroupRoom] = set()
        """The limits of the decode workers on a group's size. If there are no workers, the limits of the last workers
        apply. A request beyond all limits is refused at once, instead of waiting for a worker.
        """
        self._rooms: dict[str, GroupRoom] = {}  # of the current decode workers, by worker id
        self._lookup: Lookup | None = None
        self._end_ticket: EndTicket | None = None
        self._promised: dict[Place, int] = {}
        """Blocks promised to returning groups, until the prefill of each group has ended."""
        self._tasks: set[asyncio.Task[None]] = set()

    def set_policy(self, targets: Targets, *, disaggregates: bool) -> None:
        """Sets the limits that routes should keep, and whether a prompt may be computed in another process than the one
        that decodes it.
        """
        self._router.targets, self._router.disaggregates = targets, disaggregates

    def use_ledgers(self, lookup: Lookup, end_ticket: EndTicket) -> None:
        """Sets the functions that find cached prefixes and end tickets. They are methods of `Discoveries`."""
        self._lookup = lookup
        self._end_ticket = end_ticket

    def on_records(self, records: list[WorkerRecord]) -> None:
        """Applies the registry's list of workers after a poll."""
        self._router.update(records, time.monotonic())
        self._rooms = rooms_of(records)
        self.group_rooms = set(self._rooms.values()) or self.group_rooms
        self._sessions.sync(records)
        self.missing_for()
        self._keep(asyncio.create_task(self._keep_channels([r.address for r in records if r.role == "prefill"])))

    @property
    def ready(self) -> bool:
        """Whether some prefill worker has a decode partner with an open session."""
        return self._router.ready(self._usable)

    async def joined(self, number: int) -> None:
        """Returns when `number` workers are known, and have an open session if they decode."""
        states = self._router.workers.values()
        while sum(s.record.role == "prefill" or self._usable(s.record) for s in states) < number:
            await asyncio.sleep(JOIN_POLL_S)

    @property
    def are_restarting(self) -> bool:
        """Whether the launcher of this gateway is restarting a service. With `await_workers`, an orchestrator is
        assumed to restart workers whenever no pair of workers is ready.
        """
        if self._restarts_file is not None and self._restarts_file.exists():
            return True
        return self._await_workers and not self.ready

    def missing_for(self) -> float:
        """Returns the seconds since a pair of workers was last ready or a service was last restarting, or infinity if
        neither has occurred.
        """
        now = time.monotonic()
        if self.ready or self.are_restarting:
            self._ready_at = now
        return now - self._ready_at

    @property
    def max_model_len(self) -> int | None:
        return self._router.max_model_len()

    @property
    def states(self) -> Mapping[str, WorkerState]:
        return self._router.workers

    def gate_capacity(self) -> int:
        """Returns how many sequences of this gateway the gate lets in at a time."""
        return int(self._router.capacity() * GATE_FACTOR) + GATE_EXTRA

    def objection(self, need: GroupNeed, adapter: str) -> str | None:
        """Returns why no ready pair of workers can accept a group: the group's size or its adapter. Returns None if
        neither alone is an obstacle, or if no pair is ready.
        """
        if not self.ready:
            return None
        if not any(room.holds(need) for room in self._rooms.values()):
            return "no decode worker has room for a group of this size"
        return None if self.have_adapter(adapter) else "no pair of workers has loaded the request's adapter"

    def have_adapter(self, digest: str) -> bool:
        """Returns whether a ready pair of workers has loaded an adapter."""
        return self._router.ready(self._usable, digest)

    def adapter_states(self, digest: str) -> list[str | None]:
        """Returns, for every worker that is not draining, "" if the worker has loaded the adapter, the error if the
        worker could not load it, and None if the worker has not tried yet.
        """
        records = [state.record for state in self._router.workers.values() if not state.record.draining]
        return [record.adapters.get(digest) for record in records]

    async def pick_prefill(self, request: ResolvedRequest, need: GroupNeed) -> Route | None:
        """Picks a prefill worker and returns the route, or None if no reachable pair of workers has loaded the
        request's adapter and has room for a group of this size. The prefix index is consulted only if there are several
        arenas.
        """
        records = [s.record for s in self._router.workers.values()]
        cached: dict[str, int] = {}
        if len({record.arena_id for record in records}) > 1 and self._lookup is not None:
            cached = await self._lookup(records, request)
        asked = Asked(len(request.prompt_ids), cached, request.adapter_digest)
        pick = self._router.pick_prefill(asked, time.monotonic(), self._usable_for(need))
        return None if pick is None else Route(pick.record, asked, pick.considered)

    def failed(self, worker: WorkerRecord) -> bool:
        """Returns whether a picked worker has left, has recently failed a request, or could not be reached."""
        return self._router.failed(worker, time.monotonic())

    async def prefill(
        self, worker: WorkerRecord, request: prefill_pb2.PrefillRequest, timeout_s: float,
        on_early: OnEarly | None = None,
    ) -> prefill_pb2.PrefillDone:  # fmt: skip
        """Prefills a prompt. `on_early` receives the early tickets that the request asks for. Raises the errors of
        `PrefillClient.prefill`. For a while after WorkerLost, routing avoids the worker if the error marks it as
        suspect or unreachable.
        """
        state = self._router.workers.get(worker.worker_id)
        num_tokens = len(request.prompt_token_ids) + sum(len(b.output_token_ids) for b in request.branches)
        if state is not None:
            state.dispatched_tokens += num_tokens
        try:
            return await self._prefills.prefill(worker, request, timeout_s, on_early)
        except WorkerLost as lost:
            if lost.unreachable:
                self._router.unreachable(worker.worker_id, time.monotonic())
            elif lost.suspect:
                self._router.suspect(worker.worker_id, time.monotonic())
            raise
        finally:
            if state is not None:
                state.dispatched_tokens -= num_tokens

    def give_up(self, ticket: types_pb.Ticket) -> None:
        """Gives up a ticket that no decode worker will get, so that its blocks are released before its lease ends."""
        if self._end_ticket is not None:
            self._keep(asyncio.create_task(self._end_ticket(convert.ticket_from_pb(ticket))))

    def _on_unread(self, response: prefill_pb2.PrefillResponse) -> None:
        if response.HasField("done") and response.done.HasField("ticket"):
            self.give_up(response.done.ticket)
        if response.HasField("progress") and response.progress.HasField("early_ticket"):
            self.give_up(response.progress.early_ticket)

    def early_tickets(self, route: Route, need: GroupNeed) -> tuple[str, prefill_pb2.EarlyTickets] | None:
        """Returns the arena to which the blocks of a request should be copied during its prefill, and the early tickets
        to request for this purpose. Returns None if the request will probably be decoded in the arena in which it is
        prefilled, or if such copies are switched off or not worthwhile.
        """
        now, source, asked = time.monotonic(), route.prefill.arena_id, route.asked
        arena_id = None if self._early_tokens == 0 else self._router.destination(route, now, self._usable_for(need))
        if arena_id is None or arena_id == source:
            return None
        min_tokens = self._early_tokens or self._router.costs.worthwhile_tokens(source, arena_id, now)
        if asked.missing(arena_id) <= min_tokens:
            return None
        first_token = asked.cached.get(arena_id, 0)
        return arena_id, prefill_pb2.EarlyTickets(first_token=first_token, min_tokens=min_tokens)

    def pick_decode(self, route: Route, need: GroupNeed) -> DecodePlace | None:
        """Returns a place on a decode worker that accepts the tickets of the route's prefill worker, has room for the
        group and has loaded the request's adapter, or None if there is no such worker.
        """
        pick = self._router.pick_decode(route, time.monotonic(), self._usable_for(need))
        session = None if pick is None else self._sessions.get(pick.record.worker_id)
        if pick is None or session is None:
            return None
        return DecodePlace(session, pick, self._router, need.width)

    def promise(self, place: Place, num_blocks: Callable[[KvRules], int]) -> bool:
        """Returns whether a returning group may be prefilled now. If so, promises it blocks until `keep_promise`.

        The group may be prefilled if a decode worker reports enough free blocks or has not reported its number of
        blocks, or if this gateway has no other sequence at the workers and no promise to keep. `num_blocks` returns the
        number of blocks that the group needs under a worker's rules. Without a usable decode worker, returns True and
        promises nothing.
        """
        usable = [s for s in self._router.workers.values() if s.record.role == "decode" and self._usable(s.record)]
        for state in usable:
            rules, load = state.record.kv_rules, state.load
            needed = num_blocks(rules)
            room = (ROOM_PER_SEQUENCE * place.weight + load.num_running) * len(rules.groups)
            free = load.free_blocks - sum(self._promised.values()) - room
            if not load.total_blocks or free >= needed or self._nothing_there:
                self._promised[place] = needed
                return True
        return not usable

    def keep_promise(self, place: Place) -> None:
        """Ends a promise, if there is one, because the group's prefill has ended."""
        self._promised.pop(place, None)

    async def close(self) -> None:
        self._sessions.close()
        await self._prefills.close()
        await self.stores.close()

    @property
    def _nothing_there(self) -> bool:
        """Whether no sequence of this gateway is at the workers or on its way to the workers."""
        states = self._router.workers.values()
        return not self._promised and not any(s.dispatched_sequences or s.dispatched_tokens for s in states)

    def _usable_for(self, need: GroupNeed) -> Callable[[WorkerRecord], bool]:
        fits = {worker_id for worker_id, room in self._rooms.items() if room.holds(need)}
        return lambda record: self._usable(record) and record.worker_id in fits

    async def _keep_channels(self, prefills: Sequence[str]) -> None:
        await self._prefills.keep(prefills)
        await self.stores.keep()

    def _on_load(self, worker_id: str, load: WorkerLoad) -> None:
        self._router.report(worker_id, load, time.monotonic())

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
