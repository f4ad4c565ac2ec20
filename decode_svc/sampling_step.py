"""Turns the logits of a step into the next state of its sequences: drawn tokens, forked beams, ends.

One sampling call serves all samples of a step, and one call serves all of its beams.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from decode_svc.outputs import Outbox, of_beams, of_token
from decode_svc.running_blocks import Plan, RunningBlocks
from decode_svc.scheduler import Group
from engine.beam_search import BeamSearch, Candidates
from engine.sampler import Sampled, Sampler, SampleRow, beam_candidates
from engine.sequence import Sequence

Drawn = tuple[tuple[Group, Sequence], Sampled]
"""A sample and its next token."""
Steps = list[tuple[Group, BeamSearch, list[Candidates]]]
"""Beam searches, each with its group and the candidates of its running beams."""


class SamplingStep:
    """The part of a step that follows the forward pass. It advances groups by one token, in the step thread."""

    def __init__(
        self, blocks: RunningBlocks, outbox: Outbox, max_model_len: int, on_end: Callable[[Group], None]
    ) -> None:
        """`on_end` is called when the last sequence of a group has ended, and must drop the group."""
        self._blocks = blocks
        self._outbox = outbox
        self._max_model_len = max_model_len
        self._on_end = on_end
        self._sampler = Sampler()

    def take(self, plan: Plan, logits: torch.Tensor) -> None:
        """Applies the results of a forward pass, which are fp32 logits [len(plan), vocab]."""
        samples, searches = self._draw(plan, logits)
        ended: list[Sequence] = []
        emit, limit = self._outbox.emit, self._max_model_len
        try:
            for (group, sequence), sample in samples:
                sequence.output_ids.append(sample.token_id)
                reason = sequence.finish_reason(limit)
                emit(group, of_token(group, sequence, sample, reason))
                if reason is not None:
                    ended.append(sequence)
                    self._end(group, [sequence])
        finally:
            self._blocks.release(ended)
        for group, search, candidates in searches:
            self.advance(group, search, candidates)

    def advance(self, group: Group, search: BeamSearch, candidates: list[Candidates]) -> None:
        """Adds one token to every beam, and gives the group the sequences of the new running beams."""
        parents = search.advance(candidates)
        group.live = self._blocks.fork(group.live, parents)
        for sequence, beam in zip(group.live, search.running, strict=True):
            sequence.output_ids.append(beam.token_ids[-1])
        if search.done:
            for output in of_beams(group, search.best()):
                self._outbox.emit(group, output)
            self._on_end(group)

    def cancel(self, group: Group, sample_index: int) -> None:
        """Ends one sample without an output. Does nothing if the sample has already ended."""
        gone = [sequence for sequence in group.live if sequence.sample_index == sample_index]
        if gone:  # otherwise it has just ended by itself
            self._end(group, gone)
            self._blocks.release(gone)

    def _draw(self, plan: Plan, logits: torch.Tensor) -> tuple[list[Drawn], Steps]:
        """Returns the tokens drawn for samples and the candidates of beam searches, from logits [len(plan), vocab]."""
        beams = [row for row, (group, _) in enumerate(plan) if group.search is not None]
        if not beams:
            return self._samples(plan, logits), []
        others = [row for row, (group, _) in enumerate(plan) if group.search is None]
        samples = self._samples([plan[row] for row in others], logits[others]) if others else []
        return samples, _steps([plan[row] for row in beams], logits[beams] if others else logits)

    def _samples(self, plan: Plan, logits: torch.Tensor) -> list[Drawn]:
        found = self._sampler.draw(logits, [sequence for _, sequence in plan])
        return list(zip(plan, found, strict=True))

    def _end(self, group: Group, sequences: list[Sequence]) -> None:
        """Removes sequences from a group; the caller releases their blocks. If none remains, the group ends."""
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
