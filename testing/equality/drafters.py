"""Drafters for tests, with the interface of `decode_svc.speculation.Drafter`, and workers that verify all drafts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal

from common.types import SamplingParams
from decode_svc.draft_lengths import Option, TimeOf
from decode_svc.draft_policy import DraftLimits, DraftPolicy
from decode_svc.model_speculation import ModelSpeculation
from decode_svc.scheduler import DecodeScheduler
from decode_svc.speculation import Drafter, Speculation
from decode_svc.worker import DecodeWorker
from engine.draft_model import DraftModel, num_draft_blocks
from engine.model_runner import ModelRunner
from engine.sequence import Sequence
from testing.equality.cases import Answer, Case
from testing.equality.workers import DOMAIN, MAX_NUM_SEQS, Workers

LENGTH = 9
DRAFT_TOKENS = 6
DRAFT_CACHE_BYTES = 1 << 26
Kind = Literal["random", "perfect", "lying"]
KINDS: tuple[Kind, ...] = ("random", "perfect", "lying")
Known = Mapping[tuple[tuple[int, ...], SamplingParams, int], Seq[int]]
"""The oracle's output for each (prompt, sampling parameters, sample index)."""


class RandomDrafter:
    """A drafter that predicts random tokens, which are almost never right."""

    def __init__(self, vocab_size: int) -> None:
        self._rng = random.Random(3)
        self._vocab_size = vocab_size

    def predict(self, sequence: Sequence) -> Seq[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(LENGTH)]

    def drop(self, sequence: Sequence) -> None:
        pass


class PerfectDrafter:
    """A drafter that predicts the oracle's tokens."""

    def __init__(self, known: Known) -> None:
        self._known = known

    def predict(self, sequence: Sequence) -> Seq[int]:
        said = self._known.get((tuple(sequence.prompt_ids), sequence.sampling, sequence.sample_index), ())
        return list(said[len(sequence.output_ids) :][:LENGTH])

    def drop(self, sequence: Sequence) -> None:
        pass


class LyingDrafter(PerfectDrafter):
    """A drafter that predicts the oracle's tokens, with one wrong token at a random position."""

    def __init__(self, known: Known) -> None:
        super().__init__(known)
        self._rng = random.Random(4)

    def predict(self, sequence: Sequence) -> Seq[int]:
        tokens = [*super().predict(sequence)]
        if tokens:
            tokens[self._rng.randrange(len(tokens))] ^= 1
        return tokens


def verify_everything(
    options: Seq[Option], num: int, max_rows: int, time_of: TimeOf, draft_time_of: TimeOf | None = None
) -> list[int]:
    """Returns the length of each of the `num` sequences' drafts. Drafts get as many rows as they have room for, in
    order, while rows are left.
    """
    lens, left = [0] * num, max_rows - num
    for option in options:
        lens[option.place] = min(option.room, left)
        left -= lens[option.place]
    return lens


def drafter_of(kind: Kind, cases: Seq[Case], expected: Seq[Answer], vocab_size: int) -> Drafter:
    """Returns a drafter for these cases. `expected` contains the oracle's answers."""
    if kind == "random":
        return RandomDrafter(vocab_size)
    known = {
        (case.prompt, case.sampling, index): text.token_ids
        for case, answer in zip(cases, expected, strict=True)
        if case.sampling.beam_width is None
        for index, text in enumerate(answer)
    }
    return PerfectDrafter(known) if kind == "perfect" else LyingDrafter(known)


class SpeculatingWorkers(Workers):
    """Workers whose decode worker verifies every draft."""

    speculation: DraftPolicy

    def __init__(self, drafter: Drafter | ModelRunner, *where: Any, **settings: Any) -> None:
        """Creates the workers. `drafter` may be the runner of a draft model. The further arguments are those of
        `Workers`.
        """
        self._drafter = drafter
        super().__init__(*where, **settings)

    def new_decode(self, attached: Any, scheduler: DecodeScheduler) -> DecodeWorker:
        block_size, max_model_len = self.runner.layout.block_size, self.runner.max_model_len
        limits = DraftLimits(DRAFT_TOKENS, 4 * MAX_NUM_SEQS, block_size, max_model_len, 0, catch_up_share=None)
        if isinstance(self._drafter, ModelRunner):
            self.model = DraftModel(self._drafter, num_draft_blocks(self._drafter, MAX_NUM_SEQS, DRAFT_CACHE_BYTES))
            self.speculation = ModelSpeculation(self.model, limits, verify_everything)
        else:
            self.speculation = Speculation(self._drafter, limits, verify_everything)
        return DecodeWorker(self.runner, attached, scheduler, DOMAIN, self.preemption, self.speculation)

    def check_accepted(self, kind: Kind) -> None:
        """Raises AssertionError unless the share of accepted draft tokens fits the kind of drafter."""
        counts = self.speculation.counts
        accepted = sum(counts.accepted_by_position)
        assert counts.num_draft_tokens > counts.num_drafts > 0
        match kind:
            case "random":
                assert accepted < counts.num_draft_tokens // 10
            case "perfect":
                assert accepted == counts.num_draft_tokens
            case "lying":
                assert counts.num_draft_tokens // 4 < accepted < counts.num_draft_tokens
