"""A decode worker for tests, over a real arena and ledger, with a small prefill and the receiving end of a gateway."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from block_store.arena.arena import Arena
from block_store.holder.held_blocks import HeldBlocks
from block_store.ledger.client import LedgerClient
from block_store.ledger.codec import SealItem
from block_store.ledger.prefix_hash import chain_start, next_hash
from block_store.ledger.rebuild import open_ledger
from common.group_need import blocks_of
from common.ticket import Ticket, TicketId
from common.types import Branch, Epoch, FinishReason, SamplingParams, StoppingParams, TokenLogprob, WorkerLoad
from decode_svc.draft_policy import DraftPolicy
from decode_svc.outputs import AnyOutput, PlainToken, Rejection, Session
from decode_svc.scheduler import DecodeScheduler, Group
from decode_svc.submits import Submission
from decode_svc.worker import DecodeWorker
from engine.beam_search import BeamSearch, Candidates
from engine.block_table import BlockTable
from engine.model_runner import ModelRunner
from engine.sampler import Sampled, SampleRow, beam_candidates, sample_rows
from engine.sequence import Chunk, lay_out
from engine.sequence import Sequence as Tokens

DOMAIN = b"domain"


@dataclass
class Answer:
    """The received output of one sample or beam."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    beam_score: float | None = None


class Inbox:
    """The gateway's end of a session, which receives a worker's outputs."""

    def __init__(self) -> None:
        self.answers: defaultdict[int, dict[int, Answer]] = defaultdict(dict)
        """The outputs by handle and sample index, including the tokens that prefill drew."""
        self.rejections: dict[int, Rejection] = {}
        self.loads: list[WorkerLoad] = []
        self.session = Session(self._hear)

    def _hear(self, outputs: list[AnyOutput], load: WorkerLoad) -> None:
        self.loads.append(load)
        for item in outputs:
            output = item.as_output() if isinstance(item, PlainToken) else item
            if output.rejection is not None:
                self.rejections[output.handle] = output.rejection
                continue
            answer = self.answers[output.handle].setdefault(output.sample_index, Answer())
            assert answer.finish_reason is None and output.first_index == len(answer.token_ids)
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.finish_reason, answer.beam_score = output.finish_reason, output.beam_score

    def ids(self, handle: int) -> dict[int, list[int]]:
        return {index: answer.token_ids for index, answer in self.answers[handle].items()}


class DecodeBench:
    """A decode worker that a test runs step by step. A second holder, `prefill`, computes and hands over sequences."""

    def __init__(
        self, runner: ModelRunner, directory: Path, client: Any, *, num_blocks: int = 256, max_num_seqs: int = 64,
        reserve: int = 0, speculation: DraftPolicy | None = None,
    ) -> None:  # fmt: skip
        """Sets up the worker. `reserve` is the number of blocks that the worker keeps allocated in advance. Without
        `speculation`, nothing is drafted.
        """
        self.runner = runner
        self.block_size = runner.layout.block_size
        self.arena = Arena.create(directory, runner.layout, num_blocks)
        self._ledger = open_ledger(client, self.arena)
        self.prefill, self.held = self._holder("prefill"), self._holder("decode", reserve)
        runner.bind(self.arena.data)
        self.attached = SimpleNamespace(arena=self.arena, held=self.held, is_fenced=False, floor_blocks=num_blocks)
        self.scheduler = DecodeScheduler(max_num_seqs=max_num_seqs, max_queue=64)
        attached = cast(Any, self.attached)
        self.worker = DecodeWorker(runner, attached, self.scheduler, DOMAIN, speculation=speculation)
        self.inbox = Inbox()

    def _holder(self, name: str, reserve: int = 0) -> HeldBlocks:
        slot = self.arena.acquire_writer_slot()
        return HeldBlocks(LedgerClient.register(self._ledger, name, writer_slot=slot.number), self.arena, slot, reserve)

    def submit(
        self,
        handle: int,
        prompt: list[int],
        sampling: SamplingParams,
        stopping: StoppingParams,
        branches: Sequence[Branch] | None = None,
        *,
        priority: int = 0,
    ) -> Group:
        """Prefills these branches (by default those of a new request), submits their group and returns it."""
        made = self.prefilled(handle, prompt, sampling, stopping, branches)
        made.group.priority = priority
        self.worker.submit(self.inbox.session, *made)
        return made.group

    def prefilled(
        self,
        handle: int,
        prompt: list[int],
        sampling: SamplingParams,
        stopping: StoppingParams,
        branches: Sequence[Branch] | None = None,
    ) -> Submission:
        """Prefills these branches (by default those of a new request). Returns a submission with one ticket for all
        branches that continue. Branches with equal outputs are computed once.
        """
        is_search = sampling.beam_width is not None
        branches = branches or [Branch(index) for index in range(1 if is_search else sampling.num_sequences)]
        computed: dict[tuple[int, ...], tuple[Tokens, torch.Tensor]] = {}
        live: list[Tokens] = []
        candidates: Candidates | None = None
        for branch in branches:
            if branch.output_ids not in computed:
                computed[branch.output_ids] = self._compute(Tokens(prompt, list(branch.output_ids), sampling, stopping))
            first, logits = computed[branch.output_ids]
            sequence = first.fork(branch.sample_index)
            if is_search:
                count = BeamSearch(sampling, stopping, len(prompt), self.runner.max_model_len).num_candidates
                [candidates] = beam_candidates(logits, [SampleRow.of(sequence)], [count])
            elif self._ends(handle, sequence, sample_rows(logits, [SampleRow.of(sequence)])[0]):
                continue
            self.prefill.share(sequence.table)
            live.append(sequence)
        for first, _ in computed.values():
            self.prefill.release(list(first.table))
        return Submission(Group(handle, 0, live), self._ticket(live), b"", candidates)

    def _compute(self, sequence: Tokens) -> tuple[Tokens, torch.Tensor]:
        """Computes and seals all blocks of a sequence. Returns the sequence, and the logits [1, vocab] of its last
        token.
        """
        size, num_tokens = self.block_size, sequence.num_tokens
        refs = self.prefill.alloc(blocks_of(num_tokens, size))
        sequence.table, sequence.hashes = BlockTable(refs), [chain_start(DOMAIN, b"")]
        logits = self.runner.step(lay_out([Chunk(sequence, num_tokens)], size).batch).clone()
        full = num_tokens // size
        sequence.extend_hashes(full, size, next_hash)
        hashes = [*(sequence.block_hash(block) for block in range(full)), None]
        items = [SealItem(ref, found) for ref, found in zip(refs, hashes, strict=False)]
        sequence.table = BlockTable(self.prefill.seal(items))
        sequence.num_computed = num_tokens
        return sequence, logits

    def _ends(self, handle: int, sequence: Tokens, sample: Sampled) -> bool:
        answer = self.inbox.answers[handle].setdefault(sequence.sample_index, Answer(list(sequence.output_ids)))
        sequence.output_ids.append(sample.token_id)
        answer.token_ids.append(sample.token_id)
        answer.logprobs += [] if sample.logprob is None else [sample.logprob]
        answer.finish_reason = sequence.finish_reason(self.runner.max_model_len)
        return answer.finish_reason is not None

    def _ticket(self, live: list[Tokens]) -> Ticket:
        tables = tuple((tuple(sequence.table),) for sequence in live)
        id_ = self.prefill.hand_over([[sequence.table] for sequence in live]) if live else TicketId(Epoch(0), b"")
        return Ticket(self.arena.arena_id, id_, tables, tuple(sequence.num_computed for sequence in live))

    def run(self, max_steps: int = 500) -> int:
        """Runs steps until the worker is idle. Returns their number. Raises AssertionError if the worker is still busy
        after `max_steps` steps.
        """
        for step in range(max_steps):
            if self.worker.step() is None:
                return step + 1
        raise AssertionError(f"not done after {max_steps} steps: {self.worker.load}")

    def held_by(self, sequences: Iterable[Tokens]) -> set[int]:
        """Returns the numbers of the distinct blocks in the sequences' tables."""
        return {ref.block for sequence in sequences for ref in sequence.table}

    def close(self) -> None:
        """Closes both holders and removes the arena. Raises AssertionError if a holder still holds blocks."""
        for held in (self.held, self.prefill):
            held.assert_idle()
            held.close()
        self.arena.remove()
