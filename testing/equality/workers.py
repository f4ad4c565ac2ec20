"""A prefill worker and a decode worker in this process over a real arena and ledger, with a minimal gateway between
them. There is no RPC. Requests that come back, because a worker gave them back or lost them, are prefilled again in
order of arrival, when there are blocks for them. A beam search starts over; other requests keep their output so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from block_store.arena.arena import Arena
from block_store.errors import StaleDataset
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.breaker import BUDGET_S
from block_store.ledger.client import LedgerClient
from block_store.ledger.lease import BEAT_S
from block_store.ledger.reaper import sweep
from block_store.ledger.rebuild import open_ledger, rebuild
from block_store.ledger.scripts import LedgerScripts
from common.errors import Aborted
from common.group_need import GroupNeed
from common.kv_retention import KvRules
from common.types import Branch, WorkerLoad
from decode_svc.outputs import AnyOutput, PlainToken, Rejection, Session
from decode_svc.preemption import Choice, Preemption
from decode_svc.scheduler import DecodeScheduler, Group
from decode_svc.swap import SwapSpace
from decode_svc.worker import DecodeWorker
from engine.model_runner import ModelRunner
from engine.sequence import Sequence as Tokens
from prefill_svc.events import Done, Event
from prefill_svc.job import Job
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.worker import PrefillWorker
from testing.equality.cases import Answer, Case, Text
from testing.ledger.store import wait_until
from worker.grammars import Grammars

DOMAIN = b"domain"
MAX_NUM_SEQS = 64
MAX_STEPS = 3000
NO_FLOORS: Mapping[str, int] = MappingProxyType({})


class Attachment:
    """A worker's access to the block store, with the interface of `Attached`."""

    def __init__(
        self, arena: Arena, ledger: LedgerScripts, name: str, *, reserve: int = 0, beat_s: float | None = BEAT_S,
        budget_s: float = BUDGET_S, floor: int | None = None,
    ) -> None:  # fmt: skip
        """Registers the holder. If `beat_s` is None, the holder has no beat thread. If `floor` is None, the holder has
        no floor, and a group may need the whole arena.
        """
        self.arena = arena
        self.floor_blocks = arena.num_blocks if floor is None else floor
        self._floor = floor or 0
        self._ledger, self._name, self._reserve = ledger, name, reserve
        self._beat_s, self._budget_s = beat_s, budget_s
        self.held = self._register()

    def _register(self) -> HeldBlocks:
        slot = self.arena.acquire_writer_slot()
        ledger = self._ledger.under(self.arena.fixed.dataset)
        holder = LedgerClient.register(
            ledger, self._name, writer_slot=slot.number, floor=self._floor, beat_s=self._beat_s, budget_s=self._budget_s
        )
        return HeldBlocks(holder, self.arena, slot, self._reserve)

    @property
    def is_fenced(self) -> bool:
        return self.held.holder.fenced.is_set()

    def renew(self) -> None:
        """Gives up all blocks and registers again, like `Attached.renew`."""
        self.held.close()
        self.held = self._register()


def need_of(case: Case) -> GroupNeed:
    return GroupNeed(len(case.prompt), case.stopping.max_tokens, case.sampling.width)


@dataclass(slots=True)
class Asked:
    """A request and its output so far."""

    case: Case
    number: int
    salt: bytes
    texts: dict[int, Text] = field(default_factory=dict)
    """The outputs by sample index, or by rank for a beam search."""
    attempts: int = 0
    cached_tokens: int = 0
    """The number of the prompt's tokens that were cached in the first attempt."""

    @property
    def answer(self) -> Answer:
        return [self.texts[index] for index in sorted(self.texts)]

    @property
    def is_done(self) -> bool:
        ended = sum(text.finish_reason is not None for text in self.texts.values())
        return ended == self.case.sampling.num_sequences

    @property
    def branches(self) -> list[Branch]:
        """The branches that have not ended. A beam search has a single branch without output."""
        if self.case.sampling.beam_width is not None:
            return [Branch()]
        if not self.texts:
            return [Branch(index) for index in range(self.case.sampling.num_sequences)]
        return [Branch(i, tuple(t.token_ids)) for i, t in sorted(self.texts.items()) if t.finish_reason is None]

    def num_blocks(self, rules: KvRules) -> int:
        """Returns the largest number of blocks that the request can need."""
        return need_of(self.case).blocks(rules)


class Workers:
    """A worker of each role, with a minimal gateway."""

    def __init__(
        self,
        runner: ModelRunner,
        directory: Path,
        client: Any,
        *,
        num_blocks: int | None = None,
        budget: int = 512,
        preemption: Choice = "give-back",
        grammars: Grammars | None = None,
        floors: Mapping[str, int] = NO_FLOORS,
    ) -> None:
        """Creates the workers. `client` is a Redis client. `num_blocks` is the size of the arena, by default 512 blocks
        per KV group. `budget` is the maximum number of prompt tokens in a step. `grammars` is for structured output.
        `floors` contains the floor of each role.
        """
        self._grammars, self._floors = grammars, floors
        self.runner = runner
        self._rules = runner.layout.rules(budget)
        self.arena = Arena.create(directory, runner.layout, num_blocks or 512 * len(runner.layout.groups))
        self._client, self._ledger, self._choice = client, open_ledger(client, self.arena), preemption
        runner.bind(self.arena.data)
        self.attachments = [self._attach("prefill")]
        scheduler = PrefillScheduler(max_num_batched_tokens=budget, max_num_seqs=MAX_NUM_SEQS, max_queue=MAX_NUM_SEQS)
        self.prefill = PrefillWorker(runner, cast(Any, self.attachments[0]), scheduler, DOMAIN)
        self._start_decode()
        self._asked: list[Asked] = []
        self._returned: list[Asked] = []
        self.num_returned = 0
        self.rejections: list[tuple[int, Rejection]] = []
        """The rejections of groups by decode, as pairs of the request's number and the reason."""
        self.num_steps = 0
        """The number of decode steps."""

    def answer(
        self, cases: Sequence[Case], salt: bytes = b"", before_step: Callable[[Workers], None] = lambda _: None
    ) -> list[Asked]:
        """Runs all requests concurrently to their end, and returns them. Calls `before_step` before each decode step.
        Raises AssertionError if a request has not ended after MAX_STEPS steps.
        """
        self._asked = [Asked(case, number, salt) for number, case in enumerate(cases)]
        for asked in self._asked:
            self._send(asked)
        for _ in range(MAX_STEPS):
            if all(asked.is_done for asked in self._asked):
                return self._asked
            self._let_back()
            self.prefill.step()
            before_step(self)
            self.num_steps += 1
            self.decode.step()
        raise AssertionError(f"not done after {MAX_STEPS} steps: {self.decode.load}")

    def kill_decode(self) -> None:
        """Simulates the death of the decode worker's process: the store reaps it, and a new worker starts."""
        dead = self.attachments.pop()
        report = sweep(self._ledger, self.arena, ())  # the first sweep after a pause reaps nothing
        dead.held.writer_slot.close()
        self._client.zadd(self._ledger.tag + "leases", {str(dead.held.epoch): 1})
        reaped = sweep(self._ledger, self.arena, report.waiting_slots, report.tick).reaped
        assert reaped, "the dead worker's lease is over"
        dead.held.close()
        lost = [asked for asked in self._asked if asked.number in self._session.groups]
        self._start_decode()
        for asked in lost:
            self._come_back(asked)

    def sweep(self) -> bool:
        """Runs a sweep, as the store does periodically. If the ledger is void, rebuilds it and waits until all holders
        have joined. Returns whether the ledger was rebuilt.
        """
        try:
            sweep(self._ledger, self.arena, ())
        except StaleDataset:
            self._ledger.dataset = rebuild(self._client, self.arena)
            for holder in (attachment.held.holder for attachment in self.attachments):
                wait_until(lambda holder=holder: holder.ledger.dataset == self._ledger.dataset, 30)  # type: ignore[misc]
                wait_until(lambda holder=holder: not holder.breaker.is_open, 30)  # type: ignore[misc]
            return True
        return False

    def assert_idle(self) -> None:
        """Raises AssertionError if a worker holds blocks."""
        for attachment in self.attachments:
            attachment.held.assert_idle()

    def close(self) -> None:
        for attachment in self.attachments:
            attachment.held.close()
        self._ledger.forget()
        self.arena.remove()

    # --- the gateway's part

    def _attach(self, role: str) -> Attachment:
        return Attachment(self.arena, self._ledger, role, floor=self._floors.get(role))

    def _start_decode(self) -> None:
        attached: Any = self._attach("decode")
        self.attachments.append(attached)
        scheduler = DecodeScheduler(max_num_seqs=MAX_NUM_SEQS, max_queue=MAX_NUM_SEQS)
        swap = SwapSpace(self.runner, attached, self.arena.num_blocks * self.arena.block_bytes)
        self.preemption = Preemption(scheduler, swap, self._choice)
        self.decode = self.new_decode(attached, scheduler)
        self._session = Session(self._hear)

    def new_decode(self, attached: Any, scheduler: DecodeScheduler) -> DecodeWorker:
        return DecodeWorker(self.runner, attached, scheduler, DOMAIN, self.preemption)

    def _send(self, asked: Asked) -> None:
        case = asked.case
        job = Job.of(list(case.prompt), asked.branches, case.sampling, case.stopping)
        if self._grammars is not None:
            self._grammars.attach(job.sequences)
        self.prefill.submit(job, asked.salt, partial(self._prefilled, asked))

    def _prefilled(self, asked: Asked, event: Event) -> None:
        if isinstance(event, Aborted):
            return self._come_back(asked)
        if isinstance(event, Exception):
            raise event
        if not isinstance(event, Done):
            return
        asked.attempts += 1
        if asked.attempts == 1:
            asked.cached_tokens = event.sources.cached
        for token in event.tokens:
            text = asked.texts.setdefault(token.sample_index, Text())
            text.token_ids.append(token.token_id)
            text.logprobs += [] if token.logprob is None else [token.logprob]
            text.finish_reason = token.finish_reason
        if event.ticket is not None:
            case = asked.case
            sequences = [
                Tokens(list(case.prompt), list(branch.output_ids), case.sampling, case.stopping, branch.sample_index)
                for branch in asked.branches
            ]
            if self._grammars is not None:
                self._grammars.attach(sequences)
            group = Group(asked.number, asked.attempts, sequences)
            self.decode.submit(self._session, group, event.ticket, asked.salt, event.candidates)

    def _hear(self, outputs: list[AnyOutput], load: WorkerLoad) -> None:
        for item in outputs:
            output = item.as_output() if isinstance(item, PlainToken) else item
            asked = self._asked[output.handle]
            if output.rejection is not None:
                assert output.rejection in (Rejection.GIVEN_BACK, Rejection.LOST), output
                self.rejections.append((output.handle, output.rejection))
                self._come_back(asked)
                continue
            text = asked.texts.setdefault(output.sample_index, Text())
            assert output.first_index == len(text.token_ids) and text.finish_reason is None, output
            text.token_ids += output.token_ids
            text.logprobs += output.logprobs
            text.finish_reason, text.score = output.finish_reason, output.beam_score

    def _come_back(self, asked: Asked) -> None:
        self.num_returned += 1
        self._returned.append(asked)
        self._returned.sort(key=lambda item: item.number)

    def _let_back(self) -> None:
        """Sends requests that have come back to prefill, the oldest first, while there are blocks for them. If decode
        is idle, sends one request, even if there are too few blocks.
        """
        while self._returned:
            load = self.decode.load
            busy = load.num_running + load.num_waiting + load.num_preempted > 0
            if busy and self.attachments[-1].held.num_free_hint < self._returned[0].num_blocks(self._rules):
                return
            self._send(self._returned.pop(0))
            if not busy:
                return
