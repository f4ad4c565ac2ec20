"""Does the work of a decode worker's step thread (long: the order of a step is in one place). A step claims tickets,
reserves blocks, computes logits, draws tokens, seals full blocks, and sends the tokens.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from block_store.errors import Exhausted, Fenced, LedgerUnavailable
from block_store.holder.attach import Attached
from block_store.ledger.prefix_hash import adapter_domain, prompt_chain
from common.grammar import GrammarError
from common.group_need import blocks_of
from common.telemetry import Fallbacks
from common.ticket import Ticket
from common.types import BlockRef, WorkerLoad
from decode_svc.claims import Claim, Claims, adopt, fits_ticket, most_needed
from decode_svc.draft_policy import DraftPolicy
from decode_svc.outputs import Outbox, Rejection, Session
from decode_svc.preemption import Preemption
from decode_svc.running_blocks import Plan, RunningBlocks, copying
from decode_svc.sampling_step import SamplingStep
from decode_svc.scheduler import DecodeScheduler, Group
from decode_svc.swap import SwapSpace
from engine.beam_search import BeamSearch, Candidates
from engine.model_runner import ModelRunner
from engine.rows import DecodeRows
from engine.sequence import Sequence, Step
from worker.loop import RETRY_ALLOC_S, guarded_run, guarded_step

logger = logging.getLogger("decode")
SURVIVED_S = 6.0
"""Time in seconds for which the reserve should let running sequences continue while the ledger does not answer: the
length of a lease, plus the interval between two beats, which fill the reserve.
"""
LOAD_S = 0.05
"""Time in seconds after which the load is computed again although the queues have the same lengths."""


class DecodeWorker:
    """A decode worker, with its model, blocks and groups. All methods run in the step thread."""

    def __init__(
        self,
        runner: ModelRunner,
        attached: Attached,
        scheduler: DecodeScheduler,
        domain: bytes,
        preemption: Preemption | None = None,
        speculation: DraftPolicy | None = None,
    ) -> None:
        """Creates the worker. If `preemption` is None, preempted groups are given back. Without `speculation`, there
        are no drafts.
        """
        self._runner = runner
        self._attached = attached
        self._scheduler = scheduler
        self._domain = domain
        self._block_size = runner.layout.block_size
        self._num_groups = len(runner.layout.groups)
        self._rows = DecodeRows(self._block_size, self._num_groups)
        self._blocks = RunningBlocks(runner, attached)
        self._claims = Claims(attached)
        self._outbox = Outbox()
        self._progress = SamplingStep(self._blocks, self._outbox, runner.max_model_len, self._drop)
        self._preemption = preemption or Preemption(scheduler, SwapSpace(runner, attached, 0), "give-back")
        self._speculation = speculation
        self._fallbacks = Fallbacks(logger)
        self._draining = False
        self._spoken_for = 0
        """Number of blocks that the groups that start in this step will need."""
        self.load = WorkerLoad()
        """The load after one of the last steps. Other threads may read it."""
        self._load_of: tuple[int, ...] = ()
        """The lengths of the queues when `load` was computed."""
        self._load_at = float("-inf")

    # --- commands

    def submit(
        self,
        session: Session,
        group: Group,
        ticket: Ticket,
        salt: bytes,
        candidates: Candidates | None = None,
        public_tokens: int = 0,
    ) -> None:
        """Rejects a group or, as soon as the ledger answers, claims the group's ticket and queues the group.
        `candidates` are the candidates of a beam search's first step, or None for samples.
        """
        if candidates is not None:
            first = group.sequences[0]
            limit = self._runner.max_model_len
            group.search = BeamSearch(first.sampling, first.stopping, len(first.prompt_ids), limit)
            if self._speculation is not None:
                self._fallbacks.note("no speculation", "a beam search runs without drafts")
        if (rejection := self._objection(group, ticket)) is not None:
            self._outbox.refuse(session, group, rejection)
            self._claims.decline(ticket)
        else:
            self._outbox.open(session, group)
            prompt, adapter = group.sequences[0].prompt_ids, group.sequences[0].adapter
            domain = adapter_domain(self._domain, b"" if adapter is None else bytes.fromhex(adapter.digest))
            start, rekey = prompt_chain(domain, salt, prompt, public_tokens, self._block_size)
            for sequence in group.sequences:
                sequence.rekey = rekey
            self._claims.add(group, Claim(ticket, start, candidates))
            try:
                self._claim_all()
            except Fenced:
                self.start_over("the worker's lease had expired")
            self._update_load()  # a drain waits for this group from now on
        self._outbox.flush(self.load)

    def refuse(self, session: Session, group: Group, ticket: Ticket, why: Rejection = Rejection.GRAMMAR) -> None:
        """Rejects a group whose grammar or adapter cannot be used."""
        self._outbox.refuse(session, group, why)
        self._claims.decline(ticket)
        self._outbox.flush(self.load)

    def _objection(self, group: Group, ticket: Ticket) -> Rejection | None:
        if self._draining:
            return Rejection.DRAINING
        if self._scheduler.is_full(len(self._claims)):
            return Rejection.QUEUE_FULL
        if not fits_ticket(group, ticket, self._runner.layout):
            return Rejection.INTERNAL
        if ticket.arena_id != self._attached.arena.arena_id:
            return Rejection.LOST
        need = most_needed(group, self._runner.max_model_len)
        num_blocks = need.blocks(self._runner.layout.rules())
        if need.width > self._scheduler.max_num_seqs or num_blocks > self._attached.floor_blocks:
            return Rejection.TOO_LARGE
        return None

    def _claim_all(self) -> None:
        """Claims waiting tickets in order of arrival, while the ledger answers. Raises Fenced if the lease is lost."""
        for group, claim in self._claims.settle():
            if claim is None:
                self._reject(group, Rejection.LOST)
            else:
                self._enter(group, claim)

    def _enter(self, group: Group, claim: Claim) -> None:
        """Queues a group whose ticket has been claimed."""
        adopt(group, claim, self._block_size)
        self._scheduler.add(group)
        if group.search is not None and claim.candidates is not None:
            self._progress.advance(group, group.search, [claim.candidates])
        for sample_index in claim.cancelled:
            self._progress.cancel(group, sample_index)

    def cancel(self, session: Session, handle: int, sample_index: int | None = None) -> None:
        """Drops a group, or one of its samples, and releases the blocks. Does nothing if the group has already ended,
        or for a single beam.
        """
        if (group := session.groups.get(handle)) is None:
            return
        if sample_index is None:
            self._drop(group)
        elif group.search is None and not self._claims.cancel(group, sample_index):  # single beams are not cancelled
            self._progress.cancel(group, sample_index)

    def close(self, session: Session) -> None:
        """Drops all groups of a session that has ended."""
        for group in list(session.groups.values()):
            self._drop(group)

    # --- one step

    def step(self) -> float | None:
        """Runs one step. Returns the number of seconds to wait before the next step, or None to wait for a command."""
        ran = guarded_step(self, self._attached, logger)
        self._update_load()
        self._outbox.flush(self.load)
        if self._scheduler.idle and not self._claims:
            return None
        return 0.0 if ran else RETRY_ALLOC_S

    def work(self) -> bool:
        """Claims tickets, chooses the groups to run, reserves their blocks, and runs a step. Returns whether a step
        ran. Unlike `step`, raises the errors of the ledger and the arena (LedgerError, ArenaError).
        """
        self._claim_all()
        for group in self._scheduler.expired(time.monotonic_ns(), self._claims):
            self._reject(group, Rejection.DEADLINE)
        self._schedule()
        if plan := self._constrained(self._reserve()):
            self._reserve_for_drafts(plan)
            guarded_run(lambda: self._run(plan), lambda: self._fail(plan), self._runner, logger)
        return bool(plan)

    def _update_load(self) -> None:
        """Computes the load again if the queues have changed, or if LOAD_S has passed."""
        lengths, now = (*self._scheduler.lengths, len(self._claims)), time.monotonic()
        if lengths != self._load_of or now - self._load_at >= LOAD_S:
            self.load, self._load_of, self._load_at = self._load(), lengths, now

    def _load(self) -> WorkerLoad:
        queues = self._scheduler.load()
        self._attached.held.expect(queues.num_running * self._blocks_a_sequence())
        return WorkerLoad(
            num_running=queues.num_running,
            num_waiting=queues.num_waiting + sum(g.sequences[0].sampling.width for g in self._claims),
            free_blocks=self._attached.held.num_free_hint,
            total_blocks=self._attached.arena.num_blocks,
            num_preempted=queues.num_preempted,
            drafts=None if self._speculation is None else self._speculation.counts,
            step_fixed_s=self._preemption.costs.fixed_s,
            step_token_s=self._preemption.costs.token_s(),
        )

    def _blocks_a_sequence(self) -> int:
        """Returns the number of blocks, over all KV groups, that one sequence may take in SURVIVED_S seconds at the
        pace of recent steps.
        """
        step_s, pace = self._preemption.costs.step_s, 1.0 if self._speculation is None else self._speculation.pace
        num_tokens = min(pace * SURVIVED_S / step_s, self._runner.max_model_len) if step_s else 0
        return (blocks_of(int(num_tokens), self._block_size) + 1) * self._num_groups

    def _groups(self) -> list[Group]:
        return [*self._scheduler.groups(), *self._claims]

    def _fail(self, plan: Plan) -> None:
        for group in {group: None for group, _ in plan}:
            if group in self._outbox:
                self._reject(group, Rejection.INTERNAL)

    def _schedule(self) -> None:
        """Chooses the groups to run. A group may displace groups of a lower priority. Preempted and waiting groups
        start in the order (priority, arrival).
        """
        while (group := self._scheduler.in_the_way()) is not None:
            self._preempt(group)
        self._preemption.resume(self._preempt, self._needed)
        self._spoken_for = 0
        for group in self._scheduler.admit(self._fits):
            group.history.begin(time.monotonic_ns())

    def _preempt(self, group: Group) -> None:
        if (rejection := self._preemption.preempt(group)) is not None:
            self._reject(group, rejection)

    def _fits(self, group: Group) -> bool:
        """Returns whether enough blocks are free for a group to start: the blocks of its first step, and one more for
        each of its sequences and KV groups, in addition to the blocks for the groups that start in the same step. If
        nothing runs, any group may start.
        """
        if not self._scheduler.running:
            return True
        needed = (len(self._blocks.writes.needing_block(group.live)) + len(group.live)) * self._num_groups
        if self._attached.held.num_free_hint - self._spoken_for < needed:
            return False
        self._spoken_for += needed
        return True

    def _reserve(self) -> Plan:
        """Reserves a private block per KV group for each running sequence whose next position needs one, and returns
        the sequences of the next step. Preempts groups if there are too few blocks. If a group still gets no blocks, it
        waits, and so do all later groups that need blocks.
        """
        plan: Plan = []
        is_short = False
        for group in self._scheduler.running:  # the loop preempts only groups after `group`
            needing_block = self._blocks.writes.needing_block(group.live)
            if needing_block and (is_short or not self._reserve_for(group, needing_block)):
                is_short = True
                continue
            plan += [(group, sequence) for sequence in group.live]
        return plan

    def _constrained(self, plan: Plan) -> Plan:
        """Computes the masks of this step's tokens, and rejects the groups whose grammar becomes too complex. Returns
        the plan without the rejected groups.
        """
        if all(sequence.grammar is None for _, sequence in plan):
            return plan
        for group, sequence in plan:
            if sequence.grammar is not None and group in self._outbox:
                try:
                    sequence.grammar.mask(sequence.output_ids)
                except GrammarError as error:
                    logger.info("a grammar %s", error)
                    self._reject(group, Rejection.GRAMMAR)
        return [(group, sequence) for group, sequence in plan if group in self._outbox]

    def _needed(self) -> int:
        """Returns the number of blocks that the running groups need for this step."""
        needing = sum(len(self._blocks.writes.needing_block(group.live)) for group in self._scheduler.running)
        return needing * self._num_groups

    def _reserve_for(self, group: Group, needing_block: list[Sequence]) -> bool:
        """Reserves a block in every KV group for each of these sequences, or no blocks at all."""
        num = self._num_groups
        if (fresh := self._alloc(group, len(needing_block) * num)) is None:
            return False
        for index, sequence in enumerate(needing_block):
            self._blocks.writes.give(sequence, fresh[index * num : (index + 1) * num])
            group.history.copied_blocks += len(sequence.copy_from)
        return True

    def _reserve_for_drafts(self, plan: Plan) -> None:
        """Reserves one more block per KV group for each sequence whose draft may not fit into its blocks, if that
        leaves a block for each sequence.
        """
        if self._speculation is None or not self._speculation.may_draft:
            return
        wanting = [s for s in self._speculation.wanting_block(plan) if not s.copy_from]  # a copy goes to the last block
        num = self._num_groups
        if wanting and self._attached.held.num_free_hint >= (len(wanting) + len(plan)) * num:
            with suppress(Exhausted, LedgerUnavailable):
                fresh = self._attached.held.alloc(len(wanting) * num)
                for index, sequence in enumerate(wanting):
                    self._blocks.writes.append(sequence, fresh[index * num : (index + 1) * num])

    def _alloc(self, group: Group, num_blocks: int) -> list[BlockRef] | None:
        """Allocates blocks for `group`, and preempts later groups if necessary. Returns None if the group must wait."""
        while True:
            try:
                return self._attached.held.alloc(num_blocks)
            except LedgerUnavailable:
                return None
            except Exhausted:
                victim = self._scheduler.victim()
                if victim is None or victim is group:
                    return None
                self._preempt(victim)

    def _run(self, plan: Plan) -> None:
        sequences = [sequence for _, sequence in plan]
        drafts = [] if self._speculation is None else self._speculation.drafts(plan)
        began = time.monotonic()
        step = self._rows.lay_out(sequences, drafts)
        copies = copying(plan)
        if not self._check(plan, step, copies):  # before any launch: rejected groups release their blocks
            return
        self._blocks.writes.copy(copies)
        launched = time.monotonic()
        logits = self._runner.step(step.batch, self._progress.prepare(plan, drafts))
        num_rows = len(step.batch.logits_rows)
        self._preemption.costs.note_step(num_rows, time.monotonic() - launched)
        if not self._check(plan, step, copies, has_run=True):
            return
        self._blocks.writes.copied(copies)
        drawn = self._progress.draw(plan, logits, drafts)
        self._blocks.seal(plan)
        for group in {group: None for group, _ in plan}:
            group.history.num_steps += 1
        self._progress.publish(drawn)
        if self._speculation is not None and (drafts or self._speculation.wants_step):
            self._speculation.note(drawn.taken, num_rows, time.monotonic() - began)

    def _check(self, plan: Plan, step: Step, copies: list[Sequence], has_run: bool = False) -> bool:
        """Applies the reader rule, and rejects the groups with a stale block. If a block is stale after the step has
        run, and the model has recurrent states, rejects all groups of the step, because their states have advanced.
        Returns whether no block is stale.
        """
        stale = self._blocks.stale(plan, step, copies)
        if stale:
            logger.warning("reader rule: %d groups of %d had blocks that were reallocated", len(stale), len(plan))
            if has_run and self._runner.layout.has_states:
                stale = {group for group, _ in plan}
        for group in stale:
            self._reject(group, Rejection.LOST)
        return not stale

    # --- leaving

    def _drop(self, group: Group) -> None:
        """Removes a group, and releases its blocks."""
        self._scheduler.remove(group)
        self._preemption.drop(group)
        self._claims.drop(group)
        self._outbox.close(group)
        self._blocks.release(group.live)

    def _reject(self, group: Group, rejection: Rejection) -> None:
        self._outbox.reject(group, rejection)
        self._drop(group)

    def start_draining(self) -> None:
        """Makes the worker refuse new groups."""
        self._draining = True

    def reject_all(self, rejection: Rejection) -> None:
        """Rejects every group with this reason."""
        for group in self._groups():
            self._reject(group, rejection)
        self._outbox.flush(self.load)

    def start_over(self, reason: str) -> None:
        """Rejects all groups, and registers the worker again."""
        groups = self._groups()
        logger.warning("starting over: %s; %d groups are rejected", reason, len(groups))
        for group in groups:
            for sequence in group.live:  # `renew` gives up all blocks
                sequence.forget_blocks()
            self._reject(group, Rejection.LOST)
        self._outbox.flush(self.load)  # gateways use other workers while this one waits for the ledger
        self._attached.renew()
