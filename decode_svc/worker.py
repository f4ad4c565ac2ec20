"""The step thread's work of a decode worker: claim, reserve, compute, seal, sample, publish, release.

Knows nothing of gRPC; each session passes a `send` that is called from the step thread, once a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum

from block_store.attach import Attached
from block_store.codec import SealItem
from block_store.errors import ArenaError, Exhausted, Fenced, LedgerError, LedgerUnavailable
from block_store.hashing import chain_start, next_hash
from common.types import BlockRef, FinishReason, Ticket, Timings, TokenLogprob, WorkerLoad
from decode_svc.scheduler import DecodeScheduler, Group
from engine.runner import ModelRunner
from engine.sampler import Sampled, SampleRow, sample_rows
from engine.sequence import BlockTable, Chunk, Sequence, Step, lay_out

logger = logging.getLogger("decode")
TELL_S = 1.0
"""How often a session with waiting groups only hears of the worker."""
RETRY_ALLOC_S = 0.005
"""Pause before blocks that were not to be had are asked for again."""


class Rejection(Enum):
    """Why a group left this worker unfinished."""

    GIVEN_BACK = "given back"
    LOST = "lost"
    QUEUE_FULL = "queue full"
    DEADLINE = "deadline"
    TOO_LARGE = "too large"
    DRAINING = "draining"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought one sequence."""

    handle: int
    attempt: int
    sample_index: int = 0
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    rejection: Rejection | None = None
    timings: Timings | None = None


Send = Callable[[list[Output], WorkerLoad], None]


class Session:
    """One gateway's sequences on this worker."""

    __slots__ = ("groups", "outputs", "send")

    def __init__(self, send: Send) -> None:
        self.send = send
        self.groups: dict[int, Group] = {}
        self.outputs: list[Output] = []


class DecodeWorker:
    """Owns model, blocks and groups of a decode worker. All methods run in the step thread."""

    def __init__(self, runner: ModelRunner, attached: Attached, scheduler: DecodeScheduler, domain: bytes) -> None:
        self._runner = runner
        self._attached = attached
        self._scheduler = scheduler
        self._domain = domain
        self._block_size = runner.layout.block_size
        self._sessions: dict[Group, Session] = {}
        self._touched: set[Session] = set()
        self._unclaimed: dict[Group, tuple[Ticket, bytes]] = {}
        """Groups that wait for the ledger to answer, with ticket and the parent of their first hash."""
        self._draining = False
        self._told_at = 0.0
        self.load = WorkerLoad()
        """As of the last step; other threads may read it."""

    # --- commands

    def submit(self, session: Session, group: Group, ticket: Ticket, salt: bytes) -> None:
        """Claim the ticket at once and queue the group; whatever cannot be is rejected."""
        if (rejection := self._objection(group, ticket)) is not None:
            self._reject_new(session, group, rejection)
            self._decline(ticket)
        else:
            session.groups[group.handle] = group
            self._sessions[group] = session
            self._unclaimed[group] = (ticket, chain_start(self._domain, salt))
            self._claim_all()
        self._flush()

    def _objection(self, group: Group, ticket: Ticket) -> Rejection | None:
        if self._draining:
            return Rejection.DRAINING
        if self._scheduler.is_full(len(self._unclaimed)):
            return Rejection.QUEUE_FULL
        if not self._consistent(group, ticket):
            return Rejection.INTERNAL
        if ticket.arena_id != self._attached.arena.arena_id:
            return Rejection.LOST
        if -(-self._longest(group) // self._block_size) > self._attached.arena.num_blocks:
            return Rejection.TOO_LARGE
        return None

    def _decline(self, ticket: Ticket) -> None:
        if ticket.arena_id == self._attached.arena.arena_id:
            with suppress(Fenced):
                self._attached.held.decline(ticket)

    def _consistent(self, group: Group, ticket: Ticket) -> bool:
        """Whether the ticket's tables fit the sequences. A worker never trusts that its caller has checked."""
        return len(ticket.tables) == len(ticket.num_tokens) == len(group.sequences) > 0 and all(
            [len(table) for table in tables] == [-(-num_tokens // self._block_size)]
            and sequence.num_tokens == num_tokens + 1
            for tables, num_tokens, sequence in zip(ticket.tables, ticket.num_tokens, group.sequences, strict=True)
        )

    def _longest(self, group: Group) -> int:
        return max(min(len(s.prompt_ids) + s.stopping.max_tokens, self._runner.max_model_len) for s in group.sequences)

    def _claim_all(self) -> None:
        """Claim what is to be claimed, in order of arrival, while the ledger answers."""
        for group, (ticket, start) in list(self._unclaimed.items()):
            try:
                self._attached.held.claim(ticket)
            except LedgerUnavailable:
                return
            except Fenced:
                self._start_over("the worker's lease was over")
                return
            except LedgerError as error:
                logger.info("ticket %d cannot be claimed: %s", ticket.epoch, error)
                del self._unclaimed[group]
                self._reject(group, Rejection.LOST)
            else:
                del self._unclaimed[group]
                self._enter(group, ticket, start)

    def _enter(self, group: Group, ticket: Ticket, start: bytes) -> None:
        """Queue a group whose blocks are ours."""
        for sequence, groups, num_tokens in zip(group.sequences, ticket.tables, ticket.num_tokens, strict=True):
            sequence.table = BlockTable(groups[0])
            sequence.num_computed = num_tokens
            sequence.num_sealed = num_tokens // self._block_size
            sequence.tail_sealed = num_tokens % self._block_size != 0
            sequence.hashes = [start]
        group.live = list(group.sequences)
        group.claimed_ns = time.monotonic_ns()
        self._scheduler.add(group)

    def cancel(self, session: Session, handle: int) -> None:
        """Drop a group and release its blocks; unknown handles have ended already."""
        if (group := session.groups.get(handle)) is not None:
            self._drop(group)

    def close(self, session: Session) -> None:
        """The session is gone: drop all its groups."""
        for group in list(session.groups.values()):
            self._drop(group)

    # --- one step

    def step(self) -> float | None:
        """One forward pass. Returns the seconds to wait before the next (None: until a command comes)."""
        ran = False
        try:
            if self._attached.is_fenced:
                raise Fenced("while idle, or between two steps")
            self._claim_all()
            for group in self._scheduler.expired(time.monotonic_ns(), self._unclaimed):
                self._reject(group, Rejection.DEADLINE)
            self._scheduler.admit(self._fits)
            if plan := self._reserve():
                ran = True
                self._run_guarded(plan)
        except Fenced:
            self._start_over("the worker's lease was over")
        except LedgerUnavailable as error:  # nothing is lost; `HeldBlocks` goes on without the ledger as far as it can
            logger.warning("a step ended early: %s", error)
        except (LedgerError, ArenaError) as error:
            logger.error("the ledger refused: %s", error)
            self._start_over("the ledger refused an operation")
        self.load = self._load()
        self._flush()
        if self._scheduler.idle and not self._unclaimed:
            return None
        return 0.0 if ran else RETRY_ALLOC_S

    def _load(self) -> WorkerLoad:
        load = self._scheduler.load()
        return replace(load, num_waiting=load.num_waiting + sum(len(g.sequences) for g in self._unclaimed))

    def _groups(self) -> list[Group]:
        return [*self._scheduler.groups(), *self._unclaimed]

    def _run_guarded(self, plan: list[tuple[Group, Chunk]]) -> None:
        """A step that fails for a reason of its own costs its groups; one that fails with its device ends the thread,
        and the blocks stay ours until our lease and our process are over."""
        try:
            self._run(plan)
        except (LedgerError, ArenaError):
            raise
        except Exception as error:
            self._runner.settle(error)
            logger.exception("a step failed")
            for group in {group: None for group, _ in plan}:
                if group in self._sessions:
                    self._reject(group, Rejection.INTERNAL)

    def _fits(self, group: Group) -> bool:
        """Admission below a watermark: a group starts only while blocks for its first step can be had at once."""
        return self._attached.held.num_free_hint >= 2 * len(group.live) or not self._scheduler.running

    def _reserve(self) -> list[tuple[Group, Chunk]]:
        """Give every running sequence a block of its own for its next position, preempting where there is none."""
        plan: list[tuple[Group, Chunk]] = []
        for group in list(self._scheduler.running):
            if group not in self._sessions:  # preempted for one before it
                continue
            if not all(self._reserve_slot(group, sequence) for sequence in group.live):
                break  # the last group waits until others release blocks
            plan += [(group, Chunk(sequence, 1)) for sequence in group.live]
        return plan

    def _reserve_slot(self, group: Group, sequence: Sequence) -> bool:
        block = sequence.num_computed // self._block_size
        if block < len(sequence.table) and not sequence.tail_sealed:
            return True
        fresh = self._alloc_one(group)
        if fresh is None:
            return False
        if sequence.tail_sealed:  # the sealed partial block of the hand-over: copy on write
            sequence.copy_from = sequence.table[block]
            sequence.table[block] = fresh
            sequence.tail_sealed = False
        else:
            sequence.table.append(fresh)
        return True

    def _alloc_one(self, group: Group) -> BlockRef | None:
        """One block, at the price of groups that come after `group`; None if it must wait."""
        while True:
            try:
                return self._attached.held.alloc(1)[0]
            except LedgerUnavailable:
                return None
            except Exhausted:
                victim = self._scheduler.victim()
                if victim is None or victim is group:
                    return None
                logger.info("no block left: group %d is given back to prefill", victim.handle)
                self._reject(victim, Rejection.GIVEN_BACK)

    def _run(self, plan: list[tuple[Group, Chunk]]) -> None:
        step = lay_out([chunk for _, chunk in plan], self._block_size)
        if not self._check(plan, step):  # before anything is launched: groups that it rejects release their blocks
            return
        copying = [chunk.sequence for _, chunk in plan if chunk.sequence.copy_from is not None]
        if copying:
            self._runner.copy_blocks([_source(s).block for s in copying], [s.table[-1].block for s in copying])
        logits = self._runner.step(step.batch)
        if not self._check(plan, step):
            return
        for sequence in copying:
            self._attached.held.release([_source(sequence)])
            sequence.copy_from = None
        for _, chunk in plan:
            chunk.sequence.num_computed = chunk.end
        self._seal([chunk.sequence for _, chunk in plan])
        samples = sample_rows(logits, [SampleRow.of(chunk.sequence) for _, chunk in plan])
        for (group, chunk), sample in zip(plan, samples, strict=True):
            self._append(group, chunk.sequence, sample)

    def _check(self, plan: list[tuple[Group, Chunk]], step: Step) -> bool:
        """The reader rule, for tables and for the sources of copies. False: the stale groups were rejected."""
        arena = self._attached.arena
        stale: set[Group] = set()
        if not arena.check(step.block_table, step.generations):
            rows = zip(step.block_table, step.generations, strict=True)
            stale |= {group for (group, _), row in zip(plan, rows, strict=True) if not arena.check(*row)}
        for group, chunk in plan:
            source = chunk.sequence.copy_from
            if source is not None and int(arena.generations[source.block]) != source.generation:
                stale.add(group)
        if stale:
            logger.warning("reader rule: %d groups of %d had blocks that live another life now", len(stale), len(plan))
        for group in stale:
            self._reject(group, Rejection.LOST)
        return not stale

    def _seal(self, sequences: list[Sequence]) -> None:
        """Seal and publish the blocks that this step filled; acknowledged before any token of the step leaves."""
        filled = [s for s in sequences if s.num_full_blocks(self._block_size) > s.num_sealed]
        if not filled:
            return
        items: list[SealItem] = []
        for sequence in filled:
            sequence.extend_hashes(sequence.num_sealed + 1, self._block_size, next_hash)
            block = sequence.num_sealed
            items.append(SealItem(sequence.table[block], sequence.block_hash(block)))
        for sequence, ref in zip(filled, self._attached.held.seal(items), strict=True):
            sequence.table[sequence.num_sealed] = ref
            sequence.num_sealed += 1

    def _append(self, group: Group, sequence: Sequence, sample: Sampled) -> None:
        index = len(sequence.output_ids)
        sequence.output_ids.append(sample.token_id)
        reason = sequence.finish_reason(self._runner.max_model_len)
        timings: Timings | None = None
        if reason is not None:
            now = time.monotonic_ns()
            timings = Timings(hand_over_ns=group.claimed_ns - group.arrived_ns, decode_ns=now - group.claimed_ns)
        self._emit(
            group,
            Output(
                group.handle,
                group.attempt,
                sequence.sample_index,
                index,
                (sample.token_id,),
                () if sample.logprob is None else (sample.logprob,),
                reason,
                timings=timings,
            ),
        )
        if reason is not None:
            group.live.remove(sequence)
            self._release(sequence)
            if not group.live:
                self._drop(group)

    # --- leaving

    def _drop(self, group: Group) -> None:
        """Forget a group and release what it still holds."""
        self._scheduler.remove(group)
        if (claim := self._unclaimed.pop(group, None)) is not None:
            self._decline(claim[0])
        session = self._sessions.pop(group)
        session.groups.pop(group.handle, None)
        for sequence in group.live:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        source = [] if sequence.copy_from is None else [sequence.copy_from]
        refs = [*sequence.table, *source]
        sequence.table, sequence.copy_from = BlockTable(), None
        with suppress(Fenced):  # they were taken back already
            self._attached.held.release(refs)

    def _reject(self, group: Group, rejection: Rejection) -> None:
        self._emit(group, Output(group.handle, group.attempt, rejection=rejection))
        self._drop(group)

    def _reject_new(self, session: Session, group: Group, rejection: Rejection) -> None:
        session.outputs.append(Output(group.handle, group.attempt, rejection=rejection))
        self._touched.add(session)

    def start_draining(self) -> None:
        """Refuse new groups from now on."""
        self._draining = True

    def reject_all(self, rejection: Rejection) -> None:
        """Send every group away; their gateways prefill them again elsewhere."""
        for group in self._groups():
            self._reject(group, rejection)
        self._flush()

    def _start_over(self, reason: str) -> None:
        """Fenced: nothing that we hold is ours any more. Send everything away and register anew."""
        groups = self._groups()
        logger.warning("starting over: %s; %d groups are sent away", reason, len(groups))
        for group in groups:
            for sequence in group.live:  # renewing gives everything back at once
                sequence.table, sequence.copy_from = BlockTable(), None
            self._reject(group, Rejection.LOST)
        self._flush()  # gateways go elsewhere while this waits for the ledger
        self._attached.renew()

    # --- output

    def _emit(self, group: Group, output: Output) -> None:
        session = self._sessions[group]
        session.outputs.append(output)
        self._touched.add(session)

    def _flush(self) -> None:
        """One message per session and step; to sessions without news the load, once a second, as a sign of life."""
        now = time.monotonic()
        if now - self._told_at >= TELL_S:
            self._told_at = now
            self._touched.update(self._sessions.values())
        for session in self._touched:
            session.send(session.outputs, self.load)
            session.outputs = []
        self._touched.clear()


def _source(sequence: Sequence) -> BlockRef:
    assert sequence.copy_from is not None
    return sequence.copy_from
