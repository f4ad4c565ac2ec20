"""Simulated hosts behind the gateway's real admission, gate and router, and the path of each request through them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.errors import LooseleafError, ResourceExhausted, StartupError
from common.group_need import GroupNeed, GroupRoom, blocks_of, floor_of
from common.kv_retention import KvRules
from common.types import Role, SamplingParams, StoppingParams, WorkerLoad, WorkerRecord
from gateway.admission.admission import Admission
from gateway.admission.gate import Gate, Place
from gateway.admission.tenants import Tenants
from gateway.fleet.routing import Asked, Route, Router
from gateway.fleet.sharing import Targets
from gateway.fleet.worker_state import Pick
from gateway.fleet.workers import GATE_EXTRA, GATE_FACTOR, ROOM_PER_SEQUENCE
from gateway.intake.resolved_request import ResolvedRequest
from looseleaf.simulation import virtual_time
from looseleaf.simulation.arena import Arena, Holder, Table
from looseleaf.simulation.cores import Cores
from looseleaf.simulation.costs import Costs
from looseleaf.simulation.decode import DecodeWorker
from looseleaf.simulation.draws import Draws, Presence
from looseleaf.simulation.outcome import Outcome
from looseleaf.simulation.prefill import PrefillWorker
from looseleaf.simulation.trace import TraceRequest
from looseleaf.simulation.worker import GIVEN_BACK, Running, Setting, Worker, WorkerOptions
from worker.loop import RETRY_ALLOC_S

TENANT = ""
_DOMAIN = "simulated"


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The numbers of hosts and workers, the speed of the links between hosts, and the gateway's limits."""

    hosts: int = 1
    prefill: int = 1
    """Prefill workers of each host."""
    decode: int = 1
    turns: bool = False
    """Whether the workers of a host take turns on the same cores."""
    link_bytes_per_s: float = 1.25e9
    link_start_s: float = 0.01
    max_queue: int = 256
    max_queue_wait_s: float = 10.0
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    both: int = 0
    """Processes of each host that have both roles, which take turns. Each is a prefill and a decode worker."""
    targets: Targets = field(default_factory=Targets)
    """The router's targets."""
    disaggregates: bool = True
    """Whether a prompt may be computed in another process than the one that decodes it."""


def simulate(requests: Sequence[TraceRequest], costs: Costs, options: FleetOptions) -> list[Outcome]:
    """Returns the outcome of each request, in the order of the trace. Raises StartupError if a request is too long, or
    if an arena has too few blocks for its workers' floors.
    """
    for number, request in enumerate(requests):
        if (length := request.prompt_len + request.output_len) > options.workers.max_model_len:
            raise StartupError(
                f"request {number} of the trace has {length:,} tokens, more than --max-model-len "
                f"{options.workers.max_model_len:,}; --divide makes all requests shorter"
            )
    return virtual_time.run(_serve(requests, costs, options))


async def _serve(requests: Sequence[TraceRequest], costs: Costs, options: FleetOptions) -> list[Outcome]:
    fleet = Fleet(costs, options)
    async with asyncio.TaskGroup() as group:  # an error of a worker ends the simulation
        steps = [group.create_task(worker.run()) for worker in (*fleet.prefills.values(), *fleet.decodes.values())]
        outcomes = await asyncio.gather(*(fleet.serve(number, request) for number, request in enumerate(requests)))
        for step in steps:
            step.cancel()
    fleet.check()
    return outcomes


class Fleet:
    """The simulated deployment: hosts with their workers, and one gateway."""

    def __init__(self, costs: Costs, options: FleetOptions) -> None:
        self._clock = asyncio.get_running_loop().time
        self._costs = costs
        self._options = options
        self._draws, self._presence = Draws(costs), Presence(self._clock)
        self.router = Router()
        self.router.targets, self.router.disaggregates = options.targets, options.disaggregates
        self.gate = Gate(lambda: int(self.router.capacity() * GATE_FACTOR) + GATE_EXTRA, clock=self._clock)
        tenants = Tenants({}, 0.0)
        wait_s = options.max_queue_wait_s
        self.admission = Admission(options.max_queue, wait_s, self.gate, tenants, clock=self._clock)
        self.arenas: dict[str, Arena] = {}
        self.prefills: dict[str, PrefillWorker] = {}
        self.decodes: dict[str, DecodeWorker] = {}
        self._tickets: dict[str, Holder] = {}
        self._link_free_at: dict[tuple[str, str], float] = {}
        for number in range(options.hosts):
            self._add_host(f"host-{number}")
        workers: list[Worker] = [*self.prefills.values(), *self.decodes.values()]
        self.router.stores = dict.fromkeys(self.arenas, True)
        self.router.update([worker.record for worker in workers], 0.0)
        self._rooms = {name: GroupRoom.of(worker.record) for name, worker in self.decodes.items()}

    def _add_host(self, name: str) -> None:
        options, workers = self._options, self._options.workers
        arena = self.arenas[name] = Arena(name, workers.num_blocks)
        self._tickets[name] = arena.join(0)
        shared = Cores(self._costs) if options.turns else None
        for number in range(options.prefill):
            self._add("prefill", f"{name} prefill-{number}", arena, shared)
        for number in range(options.decode):
            self._add("decode", f"{name} decode-{number}", arena, shared)
        for number in range(options.both):
            within = shared or Cores(self._costs)
            self._add("prefill", f"{name} worker-{number}", arena, within)
            self._add("decode", f"{name} worker-{number}", arena, within)

    def _add(self, role: Role, process: str, arena: Arena, shared: Cores | None) -> None:
        """Adds a worker to a process, whose name is also its address. `shared` are the cores on which it takes turns
        with others, or None if it has cores of its own.
        """
        name = process if role in process else f"{process}.{role}"
        setting = self._setting(name, role, process, arena, shared)
        if role == "prefill":
            self.prefills[name] = PrefillWorker(setting)
        else:
            self.decodes[name] = DecodeWorker(setting)

    def _setting(self, name: str, role: Role, process: str, arena: Arena, shared: Cores | None) -> Setting:
        options, costs = self._options.workers, self._costs
        floor = self._floor(role)
        record = WorkerRecord(
            name, role, process, costs.model, arena.arena_id, options.block_size, _DOMAIN, _DOMAIN,
            options.max_model_len, options.max_num_seqs, floor, prefill_step=options.max_num_batched_tokens,
        )  # fmt: skip
        cores, takes_turns = shared or Cores(costs), shared is not None
        return Setting(record, arena, arena.join(floor), options, costs, cores, takes_turns, self._report)

    def _floor(self, role: Role) -> int:
        """Returns a worker's floor. A decode worker also gets a part of the blocks that the requested floors leave, as
        in `sizing.granted_floor`.
        """
        options = self._options.workers
        rules = KvRules(options.block_size, prefill_step=options.max_num_batched_tokens)
        asked = floor_of(role, options.max_model_len, rules)
        most = floor_of("decode", options.max_model_len, rules)  # a prefill worker's is smaller
        num_workers = self._options.prefill + self._options.decode + 2 * self._options.both
        if (left := options.num_blocks - num_workers * most) < 0:
            raise StartupError(
                f"--num-blocks {options.num_blocks}: the floors of {num_workers} workers need {num_workers * most} "
                f"blocks at --max-model-len {options.max_model_len}"
            )
        return asked + left // (2 * num_workers) if role == "decode" else asked

    def _report(self, worker_id: str, load: WorkerLoad) -> None:
        self.router.report(worker_id, load, self._clock())

    def check(self) -> None:
        """Raises AssertionError unless all blocks are free or cached, and no request has a place."""
        assert self.gate.inside == 0 == self.admission.current, "a request has kept its place"
        for arena in self.arenas.values():
            arena.check([])

    # --- one request

    async def serve(self, number: int, request: TraceRequest) -> Outcome:
        await asyncio.sleep(request.at_s)
        running = Running.of(number, request, self._options.workers.block_size)
        copied = 0
        try:
            with self._presence.enter() as kind, self.admission.enter(TENANT) as entry:
                await asyncio.sleep(self._draws.start(kind, request.prompt_len).front_s)
                entry.take([resolved := _resolved(running)])
                place = await self.gate.enter(resolved.priority, TENANT, 1, resolved.cost)
                try:
                    copied = await self._produce(running, place)
                finally:
                    self.gate.leave(place)
        except LooseleafError as refusal:
            return Outcome(request.at_s, refusal=refusal.message)
        times = self._draws.delivered(running.token_times)
        return Outcome(request.at_s, times, "", running.num_cached, copied, running.preemptions)

    async def _produce(self, running: Running, place: Place) -> int:
        """Prefills and decodes a request, and does both again if decode gives the group back. Returns the number of
        tokens that were copied between hosts.
        """
        copied = 0
        while True:
            route = self._pick_prefill(running)
            await self._prefill(running, route, place)
            if running.sample.finish_reason(self._options.workers.max_model_len) is not None:
                self.arenas[route.prefill.arena_id].release(self._tickets[route.prefill.arena_id], running.table)
                return copied
            pick = self.router.pick_decode(route, self._clock(), self._usable(running))
            assert pick is not None  # there was a usable pair when the prefill worker was chosen
            began = self._clock()
            pick.worker.dispatched_sequences += 1
            try:
                copied += await self._copy(running, route.prefill.arena_id, pick)
                why = await self._decode(running, pick, place)
            finally:
                pick.worker.dispatched_sequences -= 1
            if why != GIVEN_BACK:
                self.router.costs.note_decode(self._clock() - began, running.request.output_len)
                return copied
            await self.gate.come_back(place, lambda: self._has_room(running))

    def _pick_prefill(self, running: Running) -> Route:
        cached: dict[str, int] = {}
        if len(self.arenas) > 1:
            size = self._options.workers.block_size
            cached = {name: size * arena.num_found(running.keys) for name, arena in self.arenas.items()}
        asked = Asked(running.request.prompt_len, cached)
        pick = self.router.pick_prefill(asked, self._clock(), self._usable(running))
        if pick is None:
            raise ResourceExhausted("no decode worker has room for a group of this size")
        return Route(pick.record, asked, pick.considered)

    async def _prefill(self, running: Running, route: Route, place: Place) -> None:
        state, num_tokens = self.router.workers[route.prefill.worker_id], running.sample.num_tokens
        is_first = not running.token_times
        worker = self.prefills[route.prefill.worker_id]
        state.dispatched_tokens += num_tokens
        try:
            await worker.submit(running, place.rank)
        finally:
            state.dispatched_tokens -= num_tokens
        if is_first:
            self.gate.waited(place, running.queue_s)
        Arena.move(running.table, worker.holder, self._tickets[route.prefill.arena_id])

    async def _decode(self, running: Running, pick: Pick, place: Place) -> str:
        start = running.start or self._draws.start("warm", running.request.prompt_len)
        await asyncio.sleep(start.hand_over_s)
        worker = self.decodes[pick.record.worker_id]
        return await worker.submit(running, self._tickets[pick.record.arena_id], place.rank)

    async def _copy(self, running: Running, source: str, pick: Pick) -> int:
        """Copies blocks to the decode worker's arena if prefill used a different arena. Returns the number of copied
        tokens.
        """
        destination = pick.record.arena_id
        if source == destination:
            return 0
        began, size = self._clock(), self._options.workers.block_size
        arena, ticket, sample = self.arenas[destination], self._tickets[destination], running.sample
        keys = running.table.keys
        while True:
            table = Table(arena.acquire(ticket, keys))
            table.num_own = blocks_of(sample.num_computed, size) - len(table.keys)
            if arena.alloc(ticket, table.num_own):
                break
            table.num_own = 0
            arena.release(ticket, table)
            await asyncio.sleep(RETRY_ALLOC_S)
        num_tokens = sample.num_computed - size * len(table.keys)
        seconds = num_tokens * self._costs.kv_bytes_per_token / self._options.link_bytes_per_s
        link = source, destination
        ends = max(began, self._link_free_at.get(link, 0.0)) + self._options.link_start_s + seconds
        self._link_free_at[link] = ends
        await asyncio.sleep(ends - self._clock())
        for key in keys[len(table.keys) :]:
            arena.seal(table, key)
        self.arenas[source].release(self._tickets[source], running.table)
        running.table = table
        self.router.costs.note_copy(source, destination, num_tokens, self._clock() - began, self._clock())
        return num_tokens

    def _usable(self, running: Running) -> Callable[[WorkerRecord], bool]:
        request = running.request
        need = GroupNeed(request.prompt_len, request.output_len, 1)
        return lambda record: self._rooms[record.worker_id].holds(need)

    def _has_room(self, running: Running) -> bool:
        """Returns whether a group that was given back may be prefilled, by the rule of `Workers.promise` but without
        its promises.
        """
        needed = blocks_of(running.sample.num_tokens, self._options.workers.block_size)
        if not any(s.dispatched_sequences or s.dispatched_tokens for s in self.router.workers.values()):
            return True
        loads = [self.router.workers[name].load for name in self.decodes]
        return any(load.free_blocks - ROOM_PER_SEQUENCE - load.num_running >= needed for load in loads)


def _resolved(running: Running) -> ResolvedRequest:
    sample = running.sample
    return ResolvedRequest(
        str(running.number), sample.prompt_ids, SamplingParams(), StoppingParams(running.request.output_len), 600.0
    )
