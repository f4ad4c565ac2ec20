"""Advances the sequences of a step from its logits: draws tokens, forks beams, and ends sequences. One sampling call
serves all samples of a step, and another call serves all of its beams. The step's blocks are sealed between `draw` and
`publish`, because the number of accepted tokens decides which blocks are full.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from common.types import FinishReason
from decode_svc.outputs import Outbox, of_beams, of_token
from decode_svc.running_blocks import Plan, RunningBlocks
from decode_svc.scheduler import Group
from engine.beam_search import BeamSearch, Candidates
from engine.draft import Draft
from engine.sampler import Sampled, SampleRow, beam_candidates
from engine.sequence import Sequence
from engine.step_sampler import Sampler
from kernels.sampling import RepeatedSample

Steps = list[tuple[Group, BeamSearch, list[Candidates]]]
"""Beam searches, each with its group and the candidates of its running beams."""


class Taken(NamedTuple):
    """The tokens that a step has added to a sample: the accepted tokens of its draft and, unless one of them ends the
    sample, one more token.
    """

    group: Group
    sequence: Sequence
    samples: list[Sampled]
    reason: FinishReason | None
    num_drafted: int
    """Number of tokens of the draft."""
    num_accepted: int
    """Number of leading tokens of the draft that were drawn."""


class Drawn(NamedTuple):
    """The results of a step, which `SamplingStep.publish` applies."""

    taken: list[Taken]
    steps: Steps


class SamplingStep:
    """The part of a step after the forward pass, which advances the step's groups. It runs in the step thread."""

    def __init__(
        self, blocks: RunningBlocks, outbox: Outbox, max_model_len: int, on_end: Callable[[Group], None]
    ) -> None:
        """Creates the step. `on_end` is called when the last sequence of a group has ended, and must drop the group."""
        self._blocks = blocks
        self._outbox = outbox
        self._max_model_len = max_model_len
        self._on_end = on_end
        self._sampler = Sampler()

    def prepare(self, plan: Plan, drafts: Seq[Draft]) -> RepeatedSample | None:
        """Returns the draw that the forward pass of a step may run, or None (`Sampler.prepare`)."""
        if any(group.search is not None for group, _ in plan):
            return None
        return self._sampler.prepare([sequence for _, sequence in plan], drafts)

    def draw(self, plan: Plan, logits: torch.Tensor, drafts: Seq[Draft] = ()) -> Drawn:
        """Draws from fp32 logits [rows, vocab], and adds the tokens to their samples. A sequence has one row, and one
        more for each token of its draft. Also increases `num_computed`: for a sample by its number of new tokens, for a
        beam by 1.
        """
        if all(group.search is None for group, _ in plan):
            return Drawn(self._samples(plan, logits, drafts), [])
        rows = plan
        if drafts:
            rows = [entry for entry, draft in zip(plan, drafts, strict=True) for _ in range(draft.num_rows)]
        beams = [row for row, (group, _) in enumerate(rows) if group.search is not None]
        for row in beams:
            rows[row][1].num_computed += 1
        others = [row for row, (group, _) in enumerate(rows) if group.search is None]
        taken: list[Taken] = []
        if others:
            singles = [i for i, (group, _) in enumerate(plan) if group.search is None]
            single_drafts = [drafts[i] for i in singles] if drafts else []
            taken = self._samples([plan[i] for i in singles], logits[others], single_drafts)
        return Drawn(taken, _steps([rows[row] for row in beams], logits[beams] if others else logits))

    def publish(self, drawn: Drawn) -> None:
        """Emits the tokens, ends sequences and forks beams. The blocks that the step filled must have been sealed."""
        ended: list[Sequence] = []
        emit = self._outbox.emit
        try:
            for group, sequence, samples, reason, *_ in drawn.taken:
                index = len(sequence.output_ids) - len(samples)
                for sample in samples[:-1]:
                    emit(group, of_token(group, sequence, index, sample, None))
                    index += 1
                emit(group, of_token(group, sequence, index, samples[-1], reason))
                if reason is not None:
                    ended.append(sequence)
                    self._end(group, [sequence])
        finally:
            self._blocks.release(ended)
        for group, search, candidates in drawn.steps:
            self.advance(group, search, candidates)

    def advance(self, group: Group, search: BeamSearch, candidates: list[Candidates]) -> None:
        """Sets the group's sequences to the new running beams, each with one more token. If the search is done, emits
        its results and ends the group.
        """
        parents = search.advance(candidates)
        group.live = self._blocks.fork(group.live, parents)
        for sequence, beam in zip(group.live, search.running, strict=True):
            sequence.output_ids.append(beam.token_ids[-1])
        if search.done:
            for output in of_beams(group, search.best()):
                self._outbox.emit(group, output)
            self._on_end(group)

    def cancel(self, group: Group, sample_index: int) -> None:
        """Ends a sample without an output. Does nothing if the sample has already ended."""
        gone = [sequence for sequence in group.live if sequence.sample_index == sample_index]
        if gone:  # otherwise, the sample has already ended
            self._end(group, gone)
            self._blocks.release(gone)

    def _samples(self, plan: Plan, logits: torch.Tensor, drafts: Seq[Draft]) -> list[Taken]:
        """Draws a token for each row of the logits, and adds the tokens to their samples."""
        found = self._sampler.draw(logits, [sequence for _, sequence in plan], drafts)
        if not drafts:
            return [self._take(*entry, [sample], ()) for entry, sample in zip(plan, found, strict=True)]
        rows = iter(found)
        return [
            self._take(*entry, [next(rows) for _ in range(draft.num_rows)], draft.token_ids)
            for entry, draft in zip(plan, drafts, strict=True)
        ]

    def _take(self, group: Group, sequence: Sequence, drawn: list[Sampled], draft: tuple[int, ...]) -> Taken:
        """Adds drawn tokens to a sample, up to and including the first one that differs from the draft or ends the
        sample.
        """
        samples: list[Sampled] = []
        reason = None
        for sample, expected in zip(drawn, (*draft, None), strict=True):
            samples.append(sample)
            sequence.output_ids.append(sample.token_id)
            reason = sequence.finish_reason(self._max_model_len)
            if reason is not None or sample.token_id != expected:
                break
        sequence.num_computed += len(samples)
        accepted = len(samples) - (sample.token_id != expected)
        return Taken(group, sequence, samples, reason, len(draft), accepted)

    def _end(self, group: Group, sequences: list[Sequence]) -> None:
        """Removes sequences from a group, and calls `on_end` if none remains. The caller releases the sequences'
        blocks.
        """
        for sequence in sequences:
            group.live.remove(sequence)
        if not group.live:
            self._on_end(group)


def _steps(plan: Plan, logits: torch.Tensor) -> Steps:
    rows, counts, steps = [], [], Steps()
    for group, sequence in plan:
        search = group.search
        assert search is not None
        if not steps or steps[-1][0] is not group:
            steps.append((group, search, []))
        rows.append(SampleRow.of(sequence))
        counts.append(search.num_candidates)
    found = iter(beam_candidates(logits, rows, counts))
    for group, _, candidates in steps:
        candidates += [next(found) for _ in group.live]
    return steps
