"""A prefill worker and a decode worker in this process, with a minimal gateway between them and with faults, for the
state machine in tests/equality. Each move is a rule of the machine, so a cancel, a lost answer, a rebuild or a fence
can occur in every phase of a request. There are no periodic beats or sweeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from block_store.arena.arena import Arena
from block_store.arena.header import HeaderState
from block_store.errors import LedgerError, StaleDataset
from block_store.ledger import invariants
from block_store.ledger.inspection import inspect
from block_store.ledger.reaper import sweep
from block_store.ledger.rebuild import open_ledger, rebuild
from common.errors import Aborted
from common.group_need import GroupNeed
from common.types import BlockRef, Epoch
from decode_svc.outputs import AnyOutput, PlainToken, Rejection, Session
from decode_svc.preemption import Choice, Preemption
from decode_svc.scheduler import DecodeScheduler, Group
from decode_svc.swap import SwapSpace
from decode_svc.worker import DecodeWorker
from engine.model_runner import ModelRunner
from engine.sequence import Chunk
from engine.sequence import Sequence as Tokens
from prefill_svc.events import Done, Event
from prefill_svc.job import Job
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.worker import PrefillWorker
from testing.equality.cases import Case, Text
from testing.equality.rough_parts import Request, Role, RoughAttachment
from testing.equality.workers import DOMAIN, MAX_NUM_SEQS, Asked

MAX_PUMPS = 1200
TOKEN_BUDGET = 5
Phase = Literal["queued", "prefilled", "parked", "under way", "claimed", "decoded", "nowhere"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class RoughWorld:
    """A gateway and two workers with faults. Most public methods are moves. `finish` runs all requests to their end."""

    def __init__(
        self, runner: ModelRunner, directory: Path, client: Any, *, largest: Sequence[GroupNeed], spare_blocks: int,
        preemption: Choice, reserve: int,
    ) -> None:  # fmt: skip
        """Creates the arena and the workers. The arena has room for the largest of the needs in `largest`, and, in each
        KV group, for the reserves of both roles and for `spare_blocks`.
        """
        self.runner, self._client, self._choice = runner, client, preemption
        self._rules = runner.layout.rules(TOKEN_BUDGET)
        num_blocks = max(need.blocks(self._rules) for need in largest)
        num_blocks += (2 * reserve + spare_blocks) * len(runner.layout.groups)
        self.arena = Arena.create(directory, runner.layout, num_blocks)
        self._ledger = open_ledger(client, self.arena)
        runner.bind(self.arena.data)
        self.attachments: dict[Role, RoughAttachment] = {}
        for role in ("prefill", "decode"):
            reserve_blocks = reserve * len(runner.layout.groups)
            self.attachments[role] = RoughAttachment(self.arena, client, role, self.sweep, reserve_blocks)
        scheduler = PrefillScheduler(
            max_num_batched_tokens=TOKEN_BUDGET, max_num_seqs=MAX_NUM_SEQS, max_queue=MAX_NUM_SEQS
        )
        self.prefill = PrefillWorker(runner, self._attached("prefill"), scheduler, DOMAIN)
        self._start_decode()
        self.requests: list[Request] = []
        self.errors: list[str] = []
        """Descriptions of the errors so far. They are not raised at once, because the worker would catch them."""
        self.seen: Counter[str] = Counter()
        """The number of times that each path was taken."""
        self._by_handle: dict[int, Request] = {}

    def _attached(self, role: Role) -> Any:
        return self.attachments[role]

    def _start_decode(self) -> None:
        scheduler = DecodeScheduler(max_num_seqs=MAX_NUM_SEQS, max_queue=MAX_NUM_SEQS)
        space = SwapSpace(self.runner, self._attached("decode"), self.arena.num_blocks * self.arena.block_bytes)
        self.preemption = Preemption(scheduler, space, self._choice)
        self.decode = DecodeWorker(self.runner, self._attached("decode"), scheduler, DOMAIN, self.preemption)
        self._session = Session(self._hear)

    # --- moves of the gateway

    def ask(self, case: Case, salt: bytes) -> None:
        self.requests.append(Request(case, len(self.requests), salt))
        self._send(self.requests[-1])

    def _send(self, request: Request) -> None:
        case = request.case
        request.times_sent += 1
        request.job = Job.of(list(case.prompt), request.branches, case.sampling, case.stopping)
        self.prefill.submit(request.job, request.salt, partial(self._prefilled, request, request.job))

    def _prefilled(self, request: Request, job: Job, event: Event) -> None:
        if request.job is not job:
            self.errors.append(f"an event of a job that is over: {event}")
        elif isinstance(event, Done):
            request.job, request.arrived = None, event
            request.attempts += 1
            self._check_tenant(request, event)
        elif isinstance(event, Aborted):
            request.job = None
            self.seen["prefill aborts"] += 1
        elif isinstance(event, Exception):
            self.errors.append(f"prefill: {event!r}")

    def _check_tenant(self, request: Request, event: Done) -> None:
        """Checks that some request of the same tenant begins with the request's cached tokens."""
        self.seen["hits"] += event.sources.cached > 0
        others = [r for r in self.requests if r.salt == request.salt and (r is not request or r.times_sent > 1)]
        known = [(*r.case.prompt, *text.token_ids) for r in others for text in [Text(), *r.texts.values()]]
        head = request.case.prompt[: event.sources.cached]
        if not any(tokens[: len(head)] == head for tokens in [(), *known] if len(tokens) >= len(head)):
            self.errors.append(f"{event.sources.cached} tokens of another tenant's blocks")

    def deliver(self, request: Request) -> None:
        """Records the first tokens from prefill. If prefill issued a ticket, submits the group to decode."""
        event, request.arrived = request.arrived, None
        assert event is not None
        for token in event.tokens:
            text = request.texts.setdefault(token.sample_index, Text())
            text.token_ids.append(token.token_id)
            text.logprobs += [] if token.logprob is None else [token.logprob]
            text.finish_reason = token.finish_reason
        if event.ticket is None:
            return
        case, attempt = request.case, request.attempts
        given = {sample.sample_index for sample in event.tokens if sample.finish_reason is None}
        sequences = [
            Tokens(list(case.prompt), list(branch.output_ids), case.sampling, case.stopping, branch.sample_index)
            for branch in Asked.branches.fget(request)  # type: ignore[attr-defined]
            if event.candidates is not None or branch.sample_index in given
        ]
        request.handle = len(self._by_handle)
        self._by_handle[request.handle] = request
        group = Group(request.handle, attempt, sequences)
        self.decode.submit(self._session, group, event.ticket, request.salt, event.candidates)
        for index in request.dropped & given:
            self._cancel_at_decode(request, index)

    def _hear(self, outputs: list[AnyOutput], load: object) -> None:
        for item in outputs:
            output = item.as_output() if isinstance(item, PlainToken) else item
            request = self._by_handle[output.handle]
            if request.handle != output.handle and (request.is_cancelled or not request.is_over):
                self.errors.append(f"an output of a group that is over: {output}")
            elif output.rejection is not None:
                request.handle = None
                self.seen[output.rejection.name] += 1
                if output.rejection not in (Rejection.GIVEN_BACK, Rejection.LOST):
                    self.errors.append(f"decode: {output}")
            else:
                self._note(request, output)

    def _note(self, request: Request, output: Any) -> None:
        text = request.texts.setdefault(output.sample_index, Text())
        if output.first_index != len(text.token_ids) or text.finish_reason is not None:
            self.errors.append(f"out of order after {len(text.token_ids)} tokens: {output}")
        text.token_ids += output.token_ids
        text.logprobs += output.logprobs
        text.finish_reason, text.score = output.finish_reason, output.beam_score
        if request.is_over:
            request.handle = None

    def cancel(self, request: Request) -> None:
        """Cancels a request in any phase. If its ticket has not been sent to decode, the ticket ends with its lease."""
        request.is_cancelled, phase = True, self.phase(request)
        self.seen[f"cancel while {phase}"] += 1
        if request.job is not None:
            self.prefill.cancel(request.job)
        elif request.handle is not None:
            self.decode.cancel(self._session, request.handle)
        request.job, request.arrived, request.handle = None, None, None

    def cancel_sample(self, request: Request, index: int) -> None:
        if request.case.sampling.beam_width is None and index < request.case.sampling.num_sequences:
            request.dropped.add(index)
            self._cancel_at_decode(request, index)

    def _cancel_at_decode(self, request: Request, index: int) -> None:
        if request.handle is not None:
            self.seen["cancel of a sample"] += 1
            self.decode.cancel(self._session, request.handle, index)
            if request.is_over:
                request.handle = None

    def phase(self, request: Request) -> Phase:
        if request.job is not None:
            if request.job in self.prefill._parked:
                return "parked"
            running = [each.job for each in self.prefill._scheduler._running]
            return "prefilled" if request.job in running else "queued"
        if request.handle is not None:
            claiming = any(group.handle == request.handle for group in self.decode._claims)
            return "claimed" if claiming else "decoded"
        return "under way" if request.arrived is not None else "nowhere"

    def bring(self, request: Request, phase: Phase, num_lost: int) -> None:
        """Tries to advance a request to a phase. For the phases "parked" and "claimed", the worker's connection to
        Redis first loses `num_lost` answers, and then sends no scripts until `heal` is called.
        """
        if phase != "queued":
            self.heal()
        for _ in range(12):
            if PHASES.index(self.phase(request)) >= PHASES.index(phase):
                return
            if request.job is not None:
                if phase == "parked" and request.job.num_uncomputed <= TOKEN_BUDGET:
                    if self.phase(request) == "prefilled":  # has what its last chunk needs
                        for sequence in request.job.sequences:
                            self.prefill._blocks.grow(Chunk(sequence, sequence.num_tokens - sequence.num_computed))
                    self.attachments["prefill"].line.lose(num_lost, cut=True)
                self.prefill.step()
            elif request.arrived is not None:
                if phase == "claimed":
                    self.attachments["decode"].line.lose(num_lost, cut=True)
                self.deliver(request)

    def heal(self) -> None:
        """Ends the disturbance of the connections to Redis, and sends a beat for each worker."""
        for attachment in self.attachments.values():
            attachment.line.heal()
            attachment.beat()

    def session_ends(self) -> None:
        """Ends the gateway's session. Decode drops the session's groups, whose requests then count as cancelled."""
        self.decode.close(self._session)
        self._session = Session(self._hear)
        for request in self.requests:
            if request.handle is not None:
                request.is_cancelled, request.handle = True, None

    # --- moves of the block store, and faults

    def sweep(self) -> None:
        """Runs two consecutive sweeps. Rebuilds the ledger if it is void."""
        try:
            report = sweep(self._ledger, self.arena, ())
            sweep(self._ledger, self.arena, report.waiting_slots, report.tick)
        except StaleDataset:
            self._ledger.dataset = rebuild(self._client, self.arena)
            self.seen["rebuild"] += 1

    def lose_redis(self) -> None:
        """Deletes everything that Redis stores about this arena."""
        self._ledger.forget()

    def expire(self, epochs: list[Epoch]) -> None:
        """Expires the leases of those epochs that have one."""
        known = [epoch for epoch in epochs if self._client.zscore(self._ledger.tag + "leases", str(epoch)) is not None]
        if known:
            self._client.zadd(self._ledger.tag + "leases", {str(epoch): 1 for epoch in known})

    def fence(self, role: Role) -> None:
        self.expire([self.attachments[role].held.epoch])
        self.sweep()

    def expire_tickets(self) -> None:
        """Expires the leases of all unclaimed tickets, and sweeps. Does nothing if the ledger is void."""
        try:
            self.expire([h.epoch for h in inspect(self._ledger).holders if h.kind == "ticket"])
        except StaleDataset:
            return
        self.sweep()

    def steal(self, ref: BlockRef) -> None:
        """Reallocates a block to another writer without the ledger, as `testing.ledger.block_thief` does."""
        slot = self.arena.acquire_writer_slot()
        self.arena.raise_generations([BlockRef(ref.block, int(self.arena.generations[ref.block]) + 1)], slot.number)
        self.arena.data[ref.block] = 0x3D
        slot.close()
        self.seen["stolen"] += 1

    def kill_decode(self) -> None:
        """Simulates the death of the decode worker's process, and starts a new worker."""
        dead = self.attachments["decode"]
        dead.held.writer_slot.close()
        self.fence("decode")
        self.attachments["decode"] = RoughAttachment(self.arena, self._client, "decode", self.sweep, dead._reserve)
        self._start_decode()
        for request in self.requests:
            request.handle = None

    # --- the end of a run

    def let_back(self) -> None:
        """Sends waiting requests to prefill while there are blocks for them. If decode is idle, sends one request, even
        if there are too few blocks.
        """
        for request in self.requests:
            if self.phase(request) == "nowhere" and not request.is_over:
                load = self.decode.load
                busy = load.num_running + load.num_waiting + load.num_preempted > 0
                if busy and self.attachments["decode"].held.num_free_hint < request.num_blocks(self._rules):
                    return
                self._send(request)
                if not busy:
                    return

    def pump(self) -> None:
        """Sweeps, sends waiting requests to prefill, runs a step of prefill, delivers its results, and runs a decode
        step.
        """
        self.sweep()
        self.let_back()
        self.prefill.step()
        for request in self.requests:
            if request.arrived is not None:
                self.deliver(request)
        self.decode.step()

    def finish(self) -> list[Request]:
        """Ends all faults, and runs all requests to their end. Returns the requests that were not cancelled."""
        for pump in range(MAX_PUMPS):
            for attachment in self.attachments.values():
                attachment.line.heal()
                if pump % 10 == 0 or attachment.held.holder.breaker.is_open:
                    attachment.beat()
            if pump % 150 == 149:  # the ticket of a cancelled request keeps its blocks until its lease expires
                self.expire_tickets()
            self.pump()
            if self.errors or all(request.is_over for request in self.requests):
                break
        assert not self.errors, self.errors
        assert all(request.is_over for request in self.requests), f"not done: {self.decode.load}"
        self._check_nothing_is_held()
        return [request for request in self.requests if not request.is_cancelled]

    def _check_nothing_is_held(self) -> None:
        for attachment in self.attachments.values():
            attachment.beat()
        assert self.prefill.step() is None and self.decode.step() is None, "idle"
        self.expire_tickets()
        current = {attachment.held.epoch for attachment in self.attachments.values()}
        self.expire([h.epoch for h in inspect(self._ledger).holders if h.epoch not in current])
        self.sweep()
        for attachment in self.attachments.values():
            attachment.held.assert_idle()
        self.check()
        counts = inspect(self._ledger).counts
        assert counts.free + counts.cached + counts.reserved == counts.total, counts
        self._check_contents()

    def check(self) -> None:
        """Checks that no error has been recorded and that all invariants hold. Skips the invariants if the ledger does
        not answer.
        """
        assert not self.errors, self.errors
        try:
            found = invariants.check(self._ledger)
        except LedgerError:
            return
        assert not found, found

    def _check_contents(self) -> None:
        """Checks I7: sealed blocks contain the bytes with which they were sealed."""
        sealed = [b for b in range(self.arena.num_blocks) if self.arena.states[b] == HeaderState.SEALED]
        wrong = [block for block in sealed if self.arena.digest(block) != int(self.arena.digests[block])]
        assert not wrong, f"the bytes of blocks {wrong} have changed since they were sealed"

    def close(self) -> None:
        for attachment in self.attachments.values():
            attachment.line.heal()
            attachment.held.close()
        self._ledger.forget()
        self.arena.remove()
