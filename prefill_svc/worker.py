"""The step thread's work of a prefill worker: acquire, allocate, compute, seal, sample, hand over.

Knows nothing of gRPC; the service passes an `emit` for each job, called from the step thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from block_store.attach import Attached
from block_store.codec import SealItem
from block_store.errors import ArenaError, Exhausted, Fenced, LedgerError, LedgerUnavailable, NotHolder, Stale
from block_store.hashing import chain_start, next_hash
from common.errors import Aborted, Internal, InvalidArgument, LooseleafError
from common.types import FinishReason, PromptSources, Ticket, Timings, TokenLogprob, WorkerLoad
from engine.runner import ModelRunner
from engine.sampler import SampleRow, prompt_logprobs, sample_rows
from engine.sequence import BlockTable, Chunk, Sequence, Step, lay_out
from prefill_svc.scheduler import Job, PrefillScheduler

logger = logging.getLogger("prefill")
RETRY_ALLOC_S = 0.005
"""Pause before the head of the queue asks again for blocks that were not to be had."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A step computed part of the prompt."""

    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """The prompt is prefilled and its first token drawn; without a ticket the sequence has ended."""

    ticket: Ticket | None
    sample_index: int
    token_id: int
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
    sources: PromptSources
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...]
    load: WorkerLoad


Event = Progress | Done | LooseleafError
Emit = Callable[[Event], None]


class PrefillWorker:
    """Owns model, blocks and queue of a prefill worker. All methods run in the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached, scheduler: PrefillScheduler, domain: bytes) -> None:
        self._runner = runner
        self._attached = attached
        self._scheduler = scheduler
        self._domain = domain
        self._block_size = runner.layout.block_size
        self._emits: dict[Job, Emit] = {}
        self._parked: dict[Job, Callable[[], None]] = {}
        """Prompts that are computed and wait for the ledger to take them over, with what is left to do."""
        self.load = WorkerLoad()
        """As of the last step; other threads may read it."""

    def submit(self, job: Job, salt: bytes, emit: Emit) -> None:
        """Queue a job; its events go to `emit`, the last one is Done or an error."""
        job.sequence.hashes = [chain_start(self._domain, salt)]
        num_blocks = self._blocks_of(job.sequence.num_tokens)
        if num_blocks > self._attached.arena.num_blocks:
            limit = self._attached.arena.num_blocks * self._block_size
            emit(InvalidArgument.of("prompt", f"must fit the KV cache of {limit} tokens"))
            return
        try:
            self._scheduler.add(job)
        except LooseleafError as error:
            emit(error)
            return
        self._emits[job] = emit
        self.load = self._scheduler.load()

    def cancel(self, job: Job) -> None:
        """Drop a job, whatever it is doing, and release its blocks."""
        self._forget(job)
        self._emits.pop(job, None)
        self.load = self._scheduler.load()

    def step(self) -> float | None:
        """One forward pass. Returns the seconds to wait before the next (None: until a command comes)."""
        plan: list[tuple[Job, Chunk]] = []
        try:
            if self._attached.is_fenced:
                raise Fenced("while idle, or between two steps")
            for conclude in list(self._parked.values()):
                conclude()
            plan = self._scheduler.plan(self._admit)
            if plan:
                self._run_guarded(plan)
        except Fenced:
            self._start_over("the worker's lease was over")
        except LedgerUnavailable as error:  # nothing is lost; `HeldBlocks` goes on without the ledger as far as it can
            logger.warning("a step ended early: %s", error)
        except (LedgerError, ArenaError) as error:
            logger.error("the ledger refused: %s", error)
            self._start_over("the ledger refused an operation")
        self.load = self._scheduler.load()
        if self._scheduler.idle and not self._parked:
            return None
        return 0.0 if plan else RETRY_ALLOC_S

    def _run_guarded(self, plan: list[tuple[Job, Chunk]]) -> None:
        """A step that fails for a reason of its own costs its jobs; one that fails with its device ends the thread, and
        the blocks stay ours until our lease and our process are over."""
        try:
            self._run(plan)
        except (LedgerError, ArenaError):
            raise
        except Exception as error:
            self._runner.settle(error)
            logger.exception("a step failed")
            for job, _ in plan:
                self._fail(job, Internal("the step failed; the worker's log says why"))

    # --- admission

    def _admit(self, job: Job) -> bool:
        """Acquire the cached prefix and allocate the rest, all or nothing."""
        sequence = job.sequence
        held = self._attached.held
        reusable = 0 if sequence.sampling.prompt_logprobs is not None else (sequence.num_tokens - 1) // self._block_size
        sequence.extend_hashes(reusable, self._block_size, next_hash)
        [cached] = held.acquire([sequence.hashes[1 : reusable + 1]]) if reusable else [[]]
        try:
            fresh = held.alloc(self._blocks_of(sequence.num_tokens) - len(cached))
        except (Exhausted, LedgerUnavailable):
            held.release(cached)
            return False
        sequence.table = BlockTable([*cached, *fresh])
        sequence.num_sealed = len(cached)
        sequence.num_computed = sequence.num_cached = len(cached) * self._block_size
        job.started_ns = time.monotonic_ns()
        if sequence.output_ids:
            again = sequence.num_tokens - sequence.num_cached
            logger.info("a sequence of %d tokens came back: %d computed again", sequence.num_tokens, again)
        return True

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # --- one step

    def _run(self, plan: list[tuple[Job, Chunk]]) -> None:
        step = lay_out([chunk for _, chunk in plan], self._block_size)
        if not self._check(plan, step):
            return
        logits = self._runner.step(step.batch)
        if not self._check(plan, step):
            return
        sampled_rows = self._take_prompt_logprobs(plan, logits)
        for _, chunk in plan:
            chunk.sequence.num_computed = chunk.end
        self._seal(plan)
        complete = [job for job, chunk in plan if chunk.sequence.num_computed == chunk.sequence.num_tokens]
        if complete:
            self._finish(complete, logits[sampled_rows])
        for job, chunk in plan:
            if not chunk.completes and job in self._emits:
                self._emits[job](Progress(chunk.end))

    def _check(self, plan: list[tuple[Job, Chunk]], step: Step) -> bool:
        """The reader rule: every block is still the life that the table names. False: the stale jobs were aborted."""
        arena = self._attached.arena
        if arena.check(step.block_table, step.generations):
            return True
        rows = zip(plan, step.block_table, step.generations, strict=True)
        stale = [job for (job, _), *table in rows if not arena.check(*table)]
        logger.warning("reader rule: %d prompts of %d had blocks that live another life now", len(stale), len(plan))
        for job in stale:
            self._fail(job, Aborted("a block of the prompt was reclaimed"))
        return False

    def _take_prompt_logprobs(self, plan: list[tuple[Job, Chunk]], logits: torch.Tensor) -> list[int]:
        """Move log-probabilities of prompt rows to their sequences; returns the rows from which tokens are drawn."""
        rows: list[int] = []
        row = 0
        for _, chunk in plan:
            sequence = chunk.sequence
            k = sequence.sampling.prompt_logprobs
            num_rows = chunk.num_tokens if k is not None else int(chunk.completes)
            if k is not None:
                start = sequence.num_computed + 1
                targets = sequence.prompt_ids[start : chunk.end + 1]
                sequence.prompt_logprobs += prompt_logprobs(logits[row : row + len(targets)], targets, k)
            row += num_rows
            if chunk.completes:
                rows.append(row - 1)
        return rows

    def _seal(self, plan: list[tuple[Job, Chunk]]) -> None:
        """Seal every block that this step filled, and the partial last block of prompts that are complete."""
        items: list[SealItem] = []
        places: list[tuple[Sequence, int]] = []
        for _, chunk in plan:
            sequence = chunk.sequence
            full = sequence.num_full_blocks(self._block_size)
            sequence.extend_hashes(full, self._block_size, next_hash)
            for block in range(sequence.num_sealed, full):
                items.append(SealItem(sequence.table[block], sequence.block_hash(block)))
                places.append((sequence, block))
            sequence.num_sealed = full
            if sequence.num_computed == sequence.num_tokens and full < len(sequence.table):
                items.append(SealItem(sequence.table[full], None))
                places.append((sequence, full))
        if items:
            for (sequence, block), ref in zip(places, self._attached.held.seal(items), strict=True):
                sequence.table[block] = ref

    def _finish(self, jobs: list[Job], logits: torch.Tensor) -> None:
        """Draw each job's next token and hand its blocks to a ticket."""
        samples = sample_rows(logits, [SampleRow.of(job.sequence) for job in jobs])
        for job, sample in zip(jobs, samples, strict=True):
            sequence = job.sequence
            num_tokens = sequence.num_tokens
            sequence.output_ids.append(sample.token_id)
            reason = sequence.finish_reason(self._runner.max_model_len)
            timings = Timings(queue_ns=job.started_ns - job.arrived_ns, prefill_ns=time.monotonic_ns() - job.started_ns)
            self._scheduler.remove(job)
            done = Done(
                None,
                sequence.sample_index,
                sample.token_id,
                sample.logprob,
                reason,
                sequence.sources(),
                timings,
                tuple(sequence.prompt_logprobs),
                self._scheduler.load(),
            )
            self._conclude(job, done, num_tokens)

    def _conclude(self, job: Job, done: Done, num_tokens: int) -> None:
        """Tell the job's caller, with a ticket if the sequence goes on; later if the ledger does not answer."""
        self._parked.pop(job, None)
        ticket: Ticket | None = None
        if done.finish_reason is not None:
            self._release(job.sequence)
        else:
            try:
                ticket = self._hand_over(job.sequence.table, num_tokens)
            except LedgerUnavailable:
                self._parked[job] = lambda: self._conclude(job, done, num_tokens)
                return
            except (Stale, NotHolder):  # a block was lost in a rebuild
                self._release(job.sequence)
                self._fail(job, Aborted("a block of the prompt was reclaimed"))
                return
        self._emits.pop(job)(replace(done, ticket=ticket))

    def _hand_over(self, table: BlockTable, num_tokens: int) -> Ticket:
        epoch = self._attached.held.hand_over([[table]])
        return Ticket(self._attached.arena.arena_id, epoch, ((tuple(table),),), (num_tokens,))

    # --- failures

    def _release(self, sequence: Sequence) -> None:
        refs, sequence.table = list(sequence.table), BlockTable()
        with suppress(Fenced):  # they were taken back already
            self._attached.held.release(refs)

    def _forget(self, job: Job) -> None:
        """Take a job out, whatever it is doing, and release its blocks."""
        if self._scheduler.remove(job) or self._parked.pop(job, None) is not None:
            self._release(job.sequence)

    def _fail(self, job: Job, error: LooseleafError) -> None:
        self._forget(job)
        if (emit := self._emits.pop(job, None)) is not None:
            emit(error)

    def _start_over(self, reason: str) -> None:
        """Fenced: nothing that we hold is ours any more. Fail everything as retryable and register anew."""
        logger.warning("starting over: %s; %d prompts are sent away", reason, len(self._emits))
        self._scheduler.drop_all()
        self._parked.clear()
        emits, self._emits = self._emits, {}
        for emit in emits.values():
            emit(Aborted(reason))
        self._attached.renew()
