"""Does the work of a prefill worker's step thread, from the admission of prompts to their hand-over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from block_store.errors import LedgerUnavailable, NotHolder, Stale
from block_store.holder.attach import Attached
from block_store.ledger.prefix_hash import adapter_domain, prompt_chain
from common.errors import Aborted, Internal, InvalidArgument, LooseleafError
from common.grammar import GrammarError
from common.ticket import Ticket
from common.types import WorkerLoad
from engine.model_runner import ModelRunner
from engine.sampler import Sampled
from engine.sequence import Sequence, Step, lay_out
from engine.step import StepInput
from prefill_svc.early_tickets import hand_out
from prefill_svc.events import ChunkDone, Done, Emit, FirstToken
from prefill_svc.first_tokens import draw, take_prompt_logprobs
from prefill_svc.group_blocks import GroupBlocks, Plan
from prefill_svc.job import Job
from prefill_svc.pooling import take_pooled
from prefill_svc.scheduler import PrefillScheduler
from worker.loop import RETRY_ALLOC_S, ReaderRule, guarded_run, guarded_step

logger = logging.getLogger("prefill")
MAX_STUCK = 200
"""Number of steps (about a second) in which no prompt gets its blocks, after which even a single prompt starts over."""


class PrefillWorker:
    """A prefill worker, with its model, blocks and queue. All methods except `begin_chain` run in the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached, scheduler: PrefillScheduler, domain: bytes) -> None:
        self._runner = runner
        self._attached = attached
        self._scheduler = scheduler
        self._domain = domain
        self._block_size = runner.layout.block_size
        self._blocks = GroupBlocks(attached, runner.layout)
        self._rule = ReaderRule(attached.arena)
        self._emits: dict[Job, Emit] = {}
        self._parked: dict[Job, Callable[[], None]] = {}
        """Computed prompts that the ledger has not accepted yet, each with the function that repeats the hand-over."""
        self._num_stuck = 0
        """Number of consecutive steps in which no running prompt got its blocks."""
        self._pass_s = 0.0
        """Time in seconds that the forward passes of the step took."""
        self.load = WorkerLoad()
        """The load after the last step. Other threads may read it."""

    def submit(self, job: Job, salt: bytes, emit: Emit, public_tokens: int = 0) -> None:
        """Queues a job, or emits an error. `emit` is called in the step thread with the job's events. Unless the job is
        cancelled, the last event is Done or an error.
        """
        if not job.trunk.hashes:
            self.begin_chain(job, salt, public_tokens)
        needed = job.num_blocks(self._runner.layout.rules())
        if needed > (num_blocks := self._attached.arena.num_blocks):
            why = f"needs {needed} blocks of KV with all its branches; the arena has {num_blocks}"
            emit(InvalidArgument.of("prompt", why))
            return
        try:
            self._scheduler.add(job)
        except LooseleafError as error:
            emit(error)
            return
        self._emits[job] = emit
        self.load = self._scheduler.load()

    def begin_chain(self, job: Job, salt: bytes, public_tokens: int) -> None:
        """Sets the start of a job's prefix hashes. Changes only the job, so any thread may call it before `submit`."""
        adapter = job.trunk.adapter
        domain = adapter_domain(self._domain, b"" if adapter is None else bytes.fromhex(adapter.digest))
        start, rekey = prompt_chain(domain, salt, job.trunk.prompt_ids, public_tokens, self._block_size)
        job.trunk.hashes = [start]
        for sequence in job.sequences:
            sequence.rekey = rekey

    def cancel(self, job: Job) -> None:
        """Removes a job in any state, and releases its blocks."""
        self._forget(job)
        self._emits.pop(job, None)
        self.load = self._scheduler.load()

    def step(self) -> float | None:
        """Runs one step. Returns the number of seconds to wait before the next step, or None to wait for a command."""
        ran = guarded_step(self, self._attached, logger)
        self.load = self._scheduler.load()
        if self._scheduler.idle and not self._parked:
            return None
        return 0.0 if ran else RETRY_ALLOC_S

    def work(self) -> bool:
        """Repeats hand-overs that the ledger has not accepted, then plans and runs a step. Returns whether a step ran.
        Unlike `step`, raises the errors of the ledger and the arena (LedgerError, ArenaError).
        """
        began, self._pass_s = time.monotonic(), 0.0
        for conclude in list(self._parked.values()):
            conclude()
        self._blocks.is_short = False
        planned = self._scheduler.plan(self._admit, self._blocks.grow)
        if not planned and self._blocks.is_short:
            self._make_way()
        else:
            self._num_stuck = 0
        hand_out(self._attached, dict.fromkeys(job for job, _ in planned), self._emits)
        plan = self._constrained(planned)
        chunks = [(chunk.sequence.num_computed, chunk.num_tokens) for _, chunk in plan]
        self._guarded([(job, chunk) for job, chunk in plan if job.pool is None], self._run)
        self._guarded([(job, chunk) for job, chunk in plan if job.pool is not None], self._pool)
        if self._pass_s:
            rest_s, is_handed_over = time.monotonic() - began - self._pass_s, any(job.delivered_ns for job, _ in plan)
            self._scheduler.note_step(chunks, self._pass_s, rest_s, is_handed_over)
        return bool(plan)

    def _guarded(self, plan: Plan, run: Callable[[Plan], None]) -> None:
        if plan:
            guarded_run(lambda: run(plan), lambda: self._fail_all(plan), self._runner, logger)

    def _make_way(self) -> None:
        """Releases the blocks of the prompt that was admitted last, because no running prompt can get its blocks. At
        first, a single prompt keeps its blocks and waits, because the floor is usually enough for it. Branches that
        decode has given back may need more. Two prefill workers with such branches could wait for each other's blocks,
        so after MAX_STUCK steps even a single prompt starts over.
        """
        self._num_stuck += 1
        if (job := self._scheduler.give_way(even_alone=self._num_stuck > MAX_STUCK)) is not None:
            logger.info("no block left: a prompt gives up its blocks and waits again")
            self._num_stuck = 0
            self._blocks.release(job.sequences)
            job.start_over()

    def _fail_all(self, plan: Plan) -> None:
        for job, _ in plan:
            if job in self._emits:  # the others have ended, and decode may own their tickets
                self._fail(job, Internal("the step failed; the worker's log says why"))

    # --- one step

    def _admit(self, job: Job) -> bool:
        job.admitting_ns = time.monotonic_ns()
        if not self._blocks.admit(job):
            return False
        job.started_ns = time.monotonic_ns()
        return True

    def _constrained(self, plan: Plan) -> Plan:
        """Computes the masks for the tokens that this step draws. Returns the plan without the jobs whose grammar is
        too complex, which fail.
        """
        for job, chunk in plan:
            if chunk.completes and chunk.sequence.grammar is not None and job in self._emits:
                try:
                    chunk.sequence.grammar.mask(chunk.sequence.output_ids)
                except GrammarError as error:
                    self._fail(job, InvalidArgument.of("structured_output", str(error)))
        return [(job, chunk) for job, chunk in plan if job in self._emits]

    def _run(self, plan: Plan) -> None:
        """Runs a step that draws tokens."""
        if (logits := self._computed(plan, self._runner.step)) is None:
            return
        completed = take_prompt_logprobs(plan, logits)
        for _, chunk in plan:
            chunk.sequence.num_computed = chunk.end
        self._blocks.seal(plan)
        draw(completed, logits, self._runner.max_model_len)
        for job in dict.fromkeys(job for job, _ in plan):
            if job.is_drawn:
                self._finish(job)
            else:
                self._tell_progress(job)

    def _pool(self, plan: Plan) -> None:
        """Runs a step whose hidden states become embeddings. The step does not compute the model's head."""
        if (states := self._computed(plan, self._runner.hidden_states)) is None:
            return
        take_pooled(plan, states)
        for _, chunk in plan:
            chunk.sequence.num_computed = chunk.end
        self._blocks.seal(plan)
        for job, _ in plan:
            if job.is_computed:
                self._finish_pooled(job)
            else:
                self._tell_progress(job)

    def _computed(self, plan: Plan, forward: Callable[[StepInput], torch.Tensor]) -> torch.Tensor | None:
        """Returns the results of a step's requested rows, or None if a block is stale (reader rule)."""
        step = lay_out([chunk for _, chunk in plan], self._block_size)
        if not self._check(plan, step):
            return None
        began = time.monotonic()
        results = forward(step.batch)
        self._pass_s += time.monotonic() - began
        return results if self._check(plan, step, has_run=True) else None

    def _tell_progress(self, job: Job) -> None:
        self._emits[job](ChunkDone(min(job.trunk.num_computed, len(job.trunk.prompt_ids))))

    def _check(self, plan: Plan, step: Step, has_run: bool = False) -> bool:
        """Applies the reader rule, and aborts the jobs with a stale block. If a block is stale after the step has run,
        and the model has recurrent states, aborts all jobs of the step. Returns whether no block is stale.
        """
        stale = self._rule.stale_owners((job for job, _ in plan), step)
        if not stale:
            return True
        logger.warning("reader rule: %d prompts of %d had blocks that were reallocated", len(stale), len(plan))
        if has_run and self._runner.layout.has_states:
            stale = {job for job, _ in plan}
        for job in stale:
            self._fail(job, Aborted("a block of the prompt was reclaimed"))
        return False

    def _finish(self, job: Job) -> None:
        """Adds each branch's token, and hands over the branches that continue."""
        timings, trunk = job.timings, job.trunk
        job.sequences = self._blocks.fork(job)
        tokens = [self._append(job.sequences[place], job.drawn[place]) for place in sorted(job.drawn)]
        ended = [job.sequences[place] for place, token in enumerate(tokens) if token.finish_reason is not None]
        if ended:
            self._blocks.release(ended)
            job.sequences = [sequence for sequence in job.sequences if sequence not in ended]
        self._scheduler.remove(job)  # not before: a job that fails while it runs releases its blocks
        done = Done(
            None,
            tuple(tokens),
            job.candidates,
            trunk.sources(),
            timings,
            tuple(trunk.prompt_logprobs),
            self._scheduler.load(),
        )
        self._conclude(job, done)

    def _finish_pooled(self, job: Job) -> None:
        """Sends a job's embedding, and releases its blocks; full blocks stay cached."""
        assert job.pool is not None
        self._scheduler.remove(job)
        self._blocks.release(job.sequences)
        sources, load = job.trunk.sources(), self._scheduler.load()
        self._emits.pop(job)(Done(None, (), None, sources, job.timings, (), load, job.pool.vector()))

    def _append(self, sequence: Sequence, sampled: Sampled) -> FirstToken:
        sequence.output_ids.append(sampled.token_id)
        reason = sequence.finish_reason(self._runner.max_model_len)
        return FirstToken(sequence.sample_index, sampled.token_id, sampled.logprob, reason)

    def _conclude(self, job: Job, done: Done) -> None:
        """Sends the job's result, with a ticket if a branch continues. If the ledger does not answer, parks the job. If
        a block was lost, fails the job.
        """
        self._parked.pop(job, None)
        ticket: Ticket | None = None
        if job.sequences:
            try:
                ticket = self._blocks.hand_over(job)
                job.delivered_ns = time.monotonic_ns()
            except LedgerUnavailable:
                self._parked[job] = lambda: self._conclude(job, done)
                return
            except (Stale, NotHolder):  # a block was lost in a rebuild
                self._blocks.forget(job)
                self._fail(job, Aborted("a block of the prompt was reclaimed"))
                return
        self._emits.pop(job)(replace(done, ticket=ticket))

    # --- failures

    def _forget(self, job: Job) -> None:
        """Removes a job in any state, and releases its blocks."""
        if self._scheduler.remove(job):
            self._blocks.release(job.sequences)
        elif self._parked.pop(job, None) is not None:
            self._blocks.forget(job)
        else:  # the caller ended the call before it received the ticket
            self._blocks.end_ticket(job)

    def _fail(self, job: Job, error: LooseleafError) -> None:
        self._forget(job)
        if (emit := self._emits.pop(job, None)) is not None:
            emit(error)

    def start_over(self, reason: str) -> None:
        """Fails all jobs with a retryable error, and registers the worker again."""
        logger.warning("starting over: %s; %d prompts are rejected", reason, len(self._emits))
        self._scheduler.drop_all()
        self._parked.clear()
        emits, self._emits = self._emits, {}
        for emit in emits.values():
            emit(Aborted(reason))
        self._attached.renew()
